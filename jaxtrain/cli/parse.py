"""Words of a command line -> a verb and overrides of settings. Every mistake is a ConfigError of one line."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError

from jaxtrain.cli.verb import Positional, Verb
from jaxtrain.config import ConfigError, RunConfig, nearest
from jaxtrain.config.paths import require_local
from jaxtrain.config.suggest import suggest_key
from jaxtrain.config.values import Plain, read_value, union_branches


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--section.key value` and `--section.key=value` from other words; overrides are `section.key=value`."""
    rest: list[str] = []
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{word} has no value: write {word} VALUE or {word}=VALUE")
        overrides.append(f"{key}={value}")
    return rest, overrides


def parse_verb(name: str, kind: type[Verb], words: Sequence[str]) -> Verb:
    """The verb with its arguments; raises ConfigError for unknown, missing and wrong ones."""
    parser = make_parser(name, kind)
    found, unknown = parser.parse_known_args(list(words))
    if unknown:
        raise ConfigError(_unknown(name, kind, unknown[0]))
    fields = kind.__pydantic_fields__
    values = {key: _read(value, fields[key].annotation) for key, value in vars(found).items()}
    for key, value in values.items():
        if Path in union_branches(fields[key].annotation):
            position = next((mark for mark in fields[key].metadata if isinstance(mark, Positional)), None)
            require_local(value, position.metavar if position else _option(key))
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = _option(str(first["loc"][0]))
        choices = re.findall(r"'([^']+)'", str(first.get("ctx", {}).get("expected", "")))
        near = nearest(str(first["input"]), choices)
        raise ConfigError(f"{option} {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{near}") from None


def make_parser(name: str, kind: type[Verb], epilog: str = "") -> argparse.ArgumentParser:
    """The parser of a verb, whose help shows the docstrings of its fields."""
    description = inspect.cleandoc(kind.__doc__ or "")
    parser = _Parser(
        prog=f"jaxtrain {name}", description=description, epilog=epilog, allow_abbrev=False,
        formatter_class=_Formatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    for key, field in kind.__pydantic_fields__.items():
        text = (field.description or "").replace("%", "%%")
        position = next((mark for mark in field.metadata if isinstance(mark, Positional)), None)
        if position is not None:
            optional: dict[str, Any] = {} if field.is_required() else {"nargs": "?"}
            parser.add_argument(key, metavar=position.metavar, help=text, **optional)
            continue
        branches = [branch for branch in union_branches(field.annotation) if branch is not type(None)]
        shape: dict[str, Any] = {"metavar": _metavar(branches[0])}
        if branches == [bool]:
            shape = {"action": "store_true"}
        elif get_origin(branches[0]) is tuple:
            shape["nargs"] = "*"
        parser.add_argument(_option(key), dest=key, help=text, required=field.is_required(), **shape)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ConfigError."""
        raise ConfigError(f"{message} ({self.prog} --help shows how)")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description as prose and keeps the lines of the epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            part if re.search(r"^ ", part, re.MULTILINE) else textwrap.fill(part, width) for part in paragraphs
        )


def _unknown(name: str, kind: type[Verb], word: str) -> str:
    more = f"jaxtrain {name} --help lists its options"
    if not word.startswith("-"):
        if "=" in word and "." in word.partition("=")[0]:
            return f"{word!r} is not understood: write --{word} to override a setting"
        return f"{word!r} is one argument too many ({more})"
    option = word.partition("=")[0]
    options = [_option(key) for key in kind.__pydantic_fields__]
    close = difflib.get_close_matches(option, options, n=1, cutoff=0.75)
    setting = None if close else suggest_key(option.removeprefix("--"), RunConfig)
    near = close[0] if close else setting and f"--{setting}"
    return f"{name} has no option {option}" + (f" (did you mean {near}?)" if near else "") + f"; {more}"


def _read(value: Any, annotation: Any) -> Any:
    """Text from the command line by the type of its field, with the rules of settings."""
    if isinstance(value, list):
        return tuple(value)
    return read_value(Plain(value), annotation) if isinstance(value, str) else value


def _option(key: str) -> str:
    # A word of Python, such as from, is a field with an underscore after it.
    return "--" + key.rstrip("_").replace("_", "-")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return "TEXT"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "PATH")
