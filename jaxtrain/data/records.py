"""Records -> documents: what one record holds is text, token ids, a prompt with its response, or a chat.

A value that is no document is an `UnfitError`; the reader of its file adds where it stands.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config import SourceConfig, nearest

# What to do about a record that is damaged.
FIX = "fix it"
# The keys of OpenAI's messages, and of ShareGPT's.
MESSAGE_KEYS = (("role", "content"), ("from", "value"))
# Roles of the model in published chats.
SCORED_ROLES = ("assistant", "model", "gpt")


@dataclass(frozen=True)
class Turn:
    """A part of a document: its text, whether its tokens are scored, whether names of special tokens are special."""

    text: str
    scored: bool
    special: bool = False


@dataclass(frozen=True)
class TokenIds:
    """Token ids of a document (any integer dtype), and which of them are scored as targets (bool; None is all)."""

    ids: np.ndarray
    scored: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


Content = str | TokenIds | tuple[Turn, ...]


class UnfitError(ValueError):
    """A value that is no document, and what to do; the reader adds its line, row or record."""

    def __init__(self, message: str, fix: str = FIX) -> None:
        super().__init__(message)
        self.fix = fix


def decode(data: bytes) -> str:
    """UTF-8 text without a byte order mark; raises ValueError for zero bytes and for bytes that are not UTF-8."""
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UnfitError("UTF-16 text, by its byte order mark", "convert it (iconv -f UTF-16 -t UTF-8)")
    data = data.removeprefix(codecs.BOM_UTF8)
    if (at := data.find(0)) >= 0:
        raise UnfitError(f"binary, not text (a zero byte at offset {at})")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnfitError(f"not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})") from None


def content_of(value: Any, source: SourceConfig) -> Content:
    """The document in one record: text, token ids, prompt and response, or a chat; raises ValueError when unfit."""
    if not isinstance(value, Mapping):
        raise UnfitError(f"a {type(value).__name__}, not an object with fields")
    if source.messages_field:
        return _chat(_field(value, source.messages_field), source)
    if source.prompt_field and source.response_field:
        prompt, response = (_text(_field(value, name), name) for name in (source.prompt_field, source.response_field))
        if not response:
            raise UnfitError(f"the field {source.response_field!r} is empty: there is nothing to score")
        return Turn(prompt, False), Turn(response, True)
    name = source.field or "text"
    found = _field(value, name)
    if isinstance(found, bytes):
        return decode(found)
    return _text(found, name) if isinstance(found, str) else token_ids(found, name)


def json_path(key: str) -> str:
    """jq's filter for the items of the list under a key."""
    return f".{key}[]" if re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) else f".[{json.dumps(key)}][]"


def _field(value: Mapping[str, Any], name: str) -> Any:
    if name not in value:
        has = f"there is no field {name!r}{nearest(name, value)}; it has {', '.join(map(str, value)) or 'none'}"
        for key, items in value.items():
            if is_chat(items):
                raise UnfitError(has, chat_fix(key))
            if isinstance(items, list) and items and isinstance(items[0], Mapping) and name in items[0]:
                command = f"jq -c {shlex.quote(json_path(key))} old > new.jsonl"
                raise UnfitError(f"{has}, a list of such records", f"convert the file ({command})")
        raise UnfitError(has, "set field of the source")
    return value[name]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UnfitError(f"the field {name!r} is {_short(value)}, not text")
    return clean_text(value, f"the field {name!r}")


def clean_text(text: str, what: str) -> str:
    """The text without a byte order mark at its beginning; raises UnfitError when it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnfitError(f"{what} has a lone surrogate at character {error.start}, no text") from None
    return text.removeprefix("\ufeff")


def token_ids(value: Any, name: str) -> TokenIds:
    """Token ids of a list; raises ValueError when it is none."""
    try:
        ids = np.asarray(value) if value is not None else None
    except ValueError:
        ids = None
    if ids is None or ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        fix = chat_fix(name) if is_chat(value) else FIX
        raise UnfitError(f"the field {name!r} is {_short(value)}, neither text nor a list of token ids", fix)
    return TokenIds(ids)


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and _message_keys(value[0]) is not None


def chat_fix(name: str) -> str:
    """What to set for a field that holds a chat."""
    return f"{name} is a chat: set messages_field: {name} and a template of the source"


def _message_keys(message: Any) -> tuple[str, str] | None:
    """The keys of a message's role and text; None of anything else."""
    if not isinstance(message, Mapping):
        return None
    return next((keys for keys in MESSAGE_KEYS if set(keys) <= set(message)), None)


def _chat(messages: Any, source: SourceConfig) -> tuple[Turn, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not len(messages):
        raise UnfitError(f"the field {source.messages_field!r} is {_short(messages)}, not a list of messages")
    turns: list[Turn] = []
    for message in messages:
        keys = _message_keys(message)
        if keys is None:
            raise UnfitError(
                f"a message is {_short(message)}, not an object with role and content, or ShareGPT's from and value"
            )
        role, content = message[keys[0]], _text(message[keys[1]], keys[1])
        if not isinstance(role, str) or role not in source.template:
            raise UnfitError(
                f"the role {role!r} is not in the source's template{nearest(str(role), source.template)}, "
                f"which has {', '.join(source.template)}",
                "add it there",
            )
        before, after = source.template[role]
        scored = role in SCORED_ROLES
        turns += [Turn(before, False, True), Turn(content, scored), Turn(after, scored, True)]
    return tuple(turns)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def ids_of(data: bytes, dtype: str, masked: bool) -> TokenIds:
    """Token ids of a record, little-endian; with `masked`, one byte a token follows: whether it is scored."""
    width = np.dtype(dtype).newbyteorder("<")
    count, rest = divmod(len(data), width.itemsize + masked)
    if rest:
        raise UnfitError(f"{len(data)} bytes, no whole number of {dtype} token ids")
    scored = np.frombuffer(data, np.bool_, offset=count * width.itemsize) if masked else None
    return TokenIds(np.frombuffer(data, width, count), scored)
