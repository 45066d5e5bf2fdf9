"""Reading a value by the type of its setting: scalars of YAML files and overrides stay text until the type is known.

Differences from YAML 1.1, which PyYAML implements: a scalar for a text setting is that text (no, 123 and 2024-01-01
included); numbers are decimal (010 is 10, 60:30 is no number); 3e-4 is a number; true is no number.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?", re.ASCII)
_FIRST = list("-+.0123456789")


class Plain(str):
    """An unquoted scalar of a YAML file or an override, whose type is not known yet."""

    __slots__ = ()


class RepeatedKeyError(yaml.YAMLError):
    """A key that stands twice in one mapping; YAML readers drop the first one silently."""

    def __init__(self, key: str, first: int, second: int) -> None:
        super().__init__(f"{key} stands twice, in line {first} and in line {second}: write it once, with all entries")


class Loader(yaml.SafeLoader):
    """Reads unquoted scalars as `Plain`, keys as text; of the implicit tags only merge keys (<<) remain."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile(r"<<"))]}

    def compose_mapping_node(self, anchor: Any) -> Any:
        """A mapping; raises RepeatedKeyError. Here, since merge keys are not resolved yet."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise RepeatedKeyError(name, lines[name], line)
            lines[name] = line
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Keys are text: no key of a configuration is a number."""
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


def _construct_text(loader: Loader, node: Any) -> str:
    return str(node.value) if node.style else Plain(node.value)


Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)


class Dumper(yaml.SafeDumper):
    """Quotes every text that `Loader` or a YAML 1.1 reader could take for a number."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, _FIRST)


def parse_yaml(text: str) -> Any:
    """Mappings, lists, text and `Plain`; raises yaml.YAMLError, RepeatedKeyError for a key that stands twice."""
    return yaml.load(text, Loader=Loader)


def dump_yaml(tree: Any) -> str:
    """YAML of plain values, in their order; the inverse of `parse_yaml` followed by `read_value`."""
    return str(yaml.dump(tree, Dumper=Dumper, sort_keys=False))


def parse_override(text: str, annotation: Any) -> Any:
    """The value of an override: YAML for a list or a mapping; verbatim text, quotes included, for a text setting.

    Raises RepeatedKeyError.
    """
    if not _holds_container(annotation):
        # The empty text is no null here: on a command line null is written out.
        return Plain(text if str in union_branches(annotation) else text.strip()) if text else ""
    try:
        return parse_yaml(text) if text else ""
    except RepeatedKeyError:
        raise
    except yaml.YAMLError:
        return text


def read_value(value: Any, annotation: Any) -> Any:
    """`value` as the type of its setting asks; what does not fit the type is left for pydantic to report."""
    branches = union_branches(annotation)
    if isinstance(value, bool):
        # pydantic would read true as the number 1.
        return value if bool in branches or not {int, float} & set(branches) else str(value).lower()
    if isinstance(value, Plain):
        return _read_scalar(value, [type(None), bool, int, float, str] if Any in branches else branches)
    for branch in branches:
        arguments = get_args(branch) or (Any, Any)
        if isinstance(value, list) and (branch is Any or get_origin(branch) is list):
            return [read_value(item, arguments[0]) for item in value]
        if isinstance(value, list) and get_origin(branch) is tuple and len(value) == len(arguments):
            return [read_value(item, each) for item, each in zip(value, arguments, strict=True)]
        if isinstance(value, Mapping) and (branch is Any or get_origin(branch) is dict):
            return {str(key): read_value(item, arguments[1]) for key, item in value.items()}
    return value


def find_annotation(model: Any, key: str) -> Any:
    """The type of the setting at a dotted key, None for an unknown key."""
    for part in key.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None and get_origin(model) is dict:
            model = get_args(model)[1]
        elif fields is not None and part in fields:
            model = fields[part].annotation
        else:
            return None
    return model


def _read_scalar(text: Plain, branches: list[Any]) -> Any:
    if type(None) in branches and text in NULLS:
        return None
    if bool in branches and text in BOOLS:
        return BOOLS[text]
    number = read_number(text) if {int, float} & set(branches) else None
    if number is None or any(text in get_args(branch) for branch in branches):
        return str(text)
    # pydantic reads an integral float for an integer setting: 1e4 steps.
    return number


def read_number(text: str) -> int | float | None:
    """The finite number that a text is in decimal notation (such as 12, 1_000, 3e-4, 1.5), else None."""
    # int() refuses thousands of digits.
    if _NUMBER.fullmatch(text) is None or len(text) > 400:
        return None
    digits = text.replace("_", "")
    if digits.lstrip("+-").isdecimal():
        return int(digits)
    number = float(digits)
    return number if math.isfinite(number) else None


def union_branches(annotation: Any) -> list[Any]:
    """The types of a union, aliases and Annotated resolved; the type itself where it is none."""
    if get_origin(annotation) is Annotated:
        return union_branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [branch for each in get_args(annotation) for branch in union_branches(each)]
    return [annotation]


def _holds_container(annotation: Any) -> bool:
    for branch in union_branches(annotation):
        is_section = isinstance(branch, type) and issubclass(branch, BaseModel)
        if is_section or branch is Any or get_origin(branch) in (list, dict, tuple):
            return True
    return False
