"""A model folder of the hub: config.json and safetensors files, read by slices."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtrain.config import ConfigError
from jaxtrain.hub.fields import Json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READABLE_DTYPES = ("F32", "F16", "BF16")


class Folder:
    """The tensors of a folder, as a context manager that closes the files."""

    def __init__(self, path: Path, base: str) -> None:
        """Open every file. If no tensor name starts with `base`, it is added to all names but the head's.

        Raises ConfigError if files are missing or unreadable, or if a tensor is in two files.
        """
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, tuple[Any, str]] = {}
        for name in _files_of(path):
            self._open(path / name)
        lacks_base = base and not any(name.startswith(base) for name in self._files)
        if lacks_base:
            self._files = {
                name if name.startswith("lm_head.") else base + name: file for name, file in self._files.items()
            }
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(file.get_slice(key).get_shape()) for name, (file, key) in self._files.items()
        }
        self.dtypes: dict[str, str] = {
            name: file.get_slice(key).get_dtype() for name, (file, key) in self._files.items()
        }

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ConfigError(f"{path} is not a readable safetensors file ({error}): download it again") from None
        names: list[str] = file.keys()
        for name in names:
            if name in self._files:
                raise ConfigError(f"{name} is in {path.name} and in another file of {self.path}: keep one of them")
            self._files[name] = (file, name)

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor in the dtype of its file; only the block is read.

        Raises ConfigError for a dtype other than float32, float16 and bfloat16.
        """
        if self.dtypes[name] not in READABLE_DTYPES:
            raise ConfigError(
                f"{self.path}: {name} holds {self.dtypes[name]}, only {', '.join(READABLE_DTYPES)} are supported: use "
                "weights that are not quantized"
            )
        file, key = self._files[name]
        block: np.ndarray = file.get_slice(key)[slices]
        return block

    def are_equal(self, name: str, original: str, rows: int = 1024) -> bool:
        """Whether two tensors are equal; reads `rows` rows at a time."""
        if self.shapes[name] != self.shapes[original]:
            return False
        size = self.shapes[name][0]
        parts = (slice(start, min(start + rows, size)) for start in range(0, size, rows))
        return all(np.array_equal(self.read(name, (part,)), self.read(original, (part,))) for part in parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files = {}
        self._stack.close()


def read_json(path: Path) -> Json:
    """The JSON object in a file; raises ConfigError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}): name a model folder of the hub") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _files_of(path: Path) -> list[str]:
    if (path / INDEX).is_file():
        names = sorted({*read_json(path / INDEX).get("weight_map", {}).values()})
        if missing := [name for name in names if not (path / name).is_file()]:
            raise ConfigError(f"{path / INDEX} names {', '.join(missing)}, which are missing: download them again")
        return names
    if not (path / SINGLE).is_file():
        raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}: only safetensors files are supported")
    return [SINGLE]
