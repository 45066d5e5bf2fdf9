"""Replica groups: every notation of XLA, expanded to tuples of partition numbers."""

from __future__ import annotations

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, ?device_ids=\((.*)\))? ?\{(.*)\}$")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def read_groups(text: str, partitions: int) -> Groups:
    """Groups of `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)` or `mesh['a'=2,'b'=4] {'b'}`; `{}` is one of all.

    Raises ValueError for anything else.
    """
    if text.replace(" ", "") in ("{}", "{{}}"):
        return (tuple(range(partitions)),)
    if text.startswith("{{"):
        return tuple(_ints(group) for group in re.findall(r"\{([\d, ]+)\}", text))
    iota, mesh = _IOTA.match(text), _MESH.match(text)
    if iota:
        shape, source, order = (_ints(part or "") for part in iota.groups())
        return _rows(_iota(source, order).reshape(shape[0], -1))
    if mesh:
        return _mesh_groups(*mesh.groups())
    raise ValueError(f"replica groups {text[:80]} in a notation that is not known")


def read_pairs(text: str) -> Groups:
    """(source, target) pairs of `{{0,1},{1,0}}`, or () for ''; raises ValueError for another notation."""
    found = tuple(_ints(pair) for pair in re.findall(r"\{(\d+, ?\d+)\}", text))
    if not found and text not in ("", "{}", "{{}}"):
        raise ValueError(f"source and target pairs {text[:80]} in a notation that is not known")
    return found


def _mesh_groups(axes: str, device_ids: str | None, chosen: str) -> Groups:
    """Groups that run over the chosen axes; `'a':(p)q` is the part of size q of axis a below p."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(chosen)]
    shape, dimension = [], {}
    for name, size in sizes.items():
        done = 1
        for _, before, part in sorted((one for one in parts if one[0] == name), key=lambda one: one[1]):
            if before > done:
                shape.append(before // done)
            dimension[name, before, part] = len(shape)
            shape.append(part)
            done = before * part
        if done < size:
            shape.append(size // done)
    ids = _device_ids(device_ids, math.prod(sizes.values())).reshape(shape)
    inner = [dimension[part] for part in parts]
    outer = [i for i in range(len(shape)) if i not in inner]
    return _rows(ids.transpose(outer + inner).reshape(-1, math.prod(shape[i] for i in inner)))


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if text is None:
        return np.arange(count)
    found = re.match(r"^(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$", text)
    if found:
        return _iota(_ints(found.group(1)), _ints(found.group(2) or ""))
    numbers = _ints(text)
    if len(numbers) != count:
        raise ValueError(f"replica groups over device_ids {text[:80]} in a notation that is not known")
    return np.array(numbers)


def _iota(source: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    numbers = np.arange(math.prod(source)).reshape(source)
    return numbers.transpose(order) if order else numbers


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in array)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
