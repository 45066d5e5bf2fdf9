"""Records that are serialized tf.train.Example messages, as TFDS and T5 pipelines write them into ArrayRecord files.

Example {1: Features {1: map entry {1: name, 2: Feature {1: bytes, 2: floats, 3: ints}}}}, in protocol buffers' wire
format (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_VARINT, _BYTES = 0, 2


class _FormatError(ValueError):
    pass


def read_example(data: bytes) -> dict[str, Any] | None:
    """Features by name: bytes, or int64 [n]; float features are left out. None where `data` is no Example.

    A text is taken for one only if it is a well-formed message to its last byte, which no sentence is.
    """
    try:
        [(number, kind, features)] = _fields(data)
        if (number, kind) != (1, _BYTES):
            return None
        found: dict[str, Any] = {}
        for number, kind, entry in _fields(features):
            if (number, kind) != (1, _BYTES):
                return None
            pair = {n: value for n, _, value in _fields(entry)}
            if not isinstance(pair.get(1), bytes) or not isinstance(pair.get(2), bytes):
                return None
            value = _feature(pair[2])
            if value is not None:
                found[pair[1].decode()] = value
        return found or None
    except ValueError:  # _FormatError, another number of fields, a name that is not UTF-8
        return None


def _feature(data: bytes) -> Any:
    [(number, kind, values)] = _fields(data)
    if kind != _BYTES or number not in (1, 2, 3):
        raise _FormatError
    if number == 1:
        items = [value for n, k, value in _fields(values) if (n, k) == (1, _BYTES)]
        return items[0] if len(items) == 1 else items
    if number == 2:
        return None
    ints: list[int] = []
    for _, kind, value in _fields(values):
        ints += [value] if kind == _VARINT else _packed(value)
    return np.array(ints, np.uint64).astype(np.int64)


def _packed(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of each field; raises _FormatError where the bytes are none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, _VARINT, value
        elif key & 7 == _BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise _FormatError
            yield key >> 3, _BYTES, data[at : at + size]
            at += size
        else:
            raise _FormatError


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise _FormatError
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise _FormatError
