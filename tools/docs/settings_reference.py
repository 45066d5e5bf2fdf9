"""The reference of all settings as Markdown, read from the pydantic models of jaxtrain/config."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from jaxtrain.config import RunConfig
from jaxtrain.config.aliases import KEYS, VALUES


@dataclass(frozen=True)
class Setting:
    """One setting: dotted name (entries of a list as name[]), type, default, documentation."""

    name: str
    kind: str
    default: str
    text: str


def settings(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[Setting]:
    """Every setting below a section, depth first, in the order of the source."""
    for key, field in model.model_fields.items():
        name = f"{prefix}{key}"
        section, item = _section(field.annotation), _item_section(field.annotation)
        if section is not None:
            yield from settings(section, f"{name}.")
            continue
        yield Setting(name, show_type(field.annotation, field.metadata), _default(field), field.description or "")
        if item is not None:
            yield from settings(item, f"{name}[].")


def sections(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, model) of each section, lists of sections included; top-level scalars are not sections."""
    for key, field in model.model_fields.items():
        found, item = _section(field.annotation), _item_section(field.annotation)
        if found is not None:
            yield f"{prefix}{key}", found
            yield from sections(found, f"{prefix}{key}.")
        elif item is not None:
            yield f"{prefix}{key}[]", item
            yield from sections(item, f"{prefix}{key}[].")


def show_type(annotation: Any, metadata: Any = ()) -> str:
    """A type as a reader of YAML knows it: `text`, `positive integer or null`, `list of text`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return show_type(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(show_type(arg) for arg in args))
    if origin is Literal:
        return ", ".join(str(arg) for arg in args)
    if origin in (list, tuple):
        inner = [show_type(arg) for arg in args]
        return f"list of {inner[0]}" if origin is list else f"[{', '.join(inner)}]"
    if origin is dict:
        return f"mapping of {show_type(args[0])} to {show_type(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = _NAMES.get(annotation, "value")
    bounds = [f"{sign} {getattr(mark, attribute):g}" for mark in metadata for attribute, sign in _BOUNDS
              if getattr(mark, attribute, None) is not None]  # fmt: skip
    return f"{name} {' and '.join(bounds)}" if bounds else name


_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def settings_markdown() -> str:
    """The body of the page: a table per section, then the old names."""
    rows = list(settings())
    top = [row for row in rows if "." not in row.name]
    parts = [f"{len(rows)} settings, entries of lists included."]
    for name, model in sections():
        own = [row for row in rows if row.name.rpartition(".")[0] == name]
        parts += [f"## {name} {{#{slug(name)}}}", _cell(model.__doc__ or "").partition("  ")[0], _table(own, name)]
    parts += ["## xla", _table(top, "")] if top else []
    old = [f"| `{was}` | `{now}` |" for was, now in KEYS.items()]
    old += [f"| `{key}: {was}` | `{key}: {now}` |" for key, values in VALUES.items() for was, now in values.items()]
    head = "Accepted with a hint on stderr; the changelog says until which version.\n\n| old | new |\n|---|---|"
    return "\n\n".join([*parts, "## Old names", "\n".join([head, *old])]) + "\n"


def slug(name: str) -> str:
    """The anchor of a section: data.sources[] -> data-sources."""
    return name.replace(".", "-").replace("[]", "")


def _table(rows: list[Setting], section: str) -> str:
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    for row in rows:
        short = row.name.removeprefix(f"{section}.")
        lines.append(f"| `{short}` | {_cell(row.kind)} | {_cell(row.default)} | {_cell(row.text)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("[]", "\\[\\]")


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        value = [item.model_dump(exclude_unset=True) for item in value]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _item_section(annotation: Any) -> type[BaseModel] | None:
    return _section(get_args(annotation)[0]) if get_origin(annotation) is list else None
