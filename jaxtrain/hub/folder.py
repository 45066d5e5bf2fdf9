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
from jaxtrain.config.aliases import hint
from jaxtrain.hub.fields import Json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READABLE_DTYPES = ("F32", "F16", "BF16")
SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "_scales", "_blocks", ".qweight", ".qzeros", ".absmax")
"""Ends of the names of tensors that only quantized weights have (fp8, mxfp4, GPTQ, AWQ, bitsandbytes)."""


class Folder:
    """The tensors of a folder, as a context manager that closes the files."""

    def __init__(self, path: Path, base: str) -> None:
        """Open every file. If no tensor name starts with `base`, it is added to all names but the head's.

        Raises ConfigError if files are missing or unreadable, if it is not clear which files hold the model, if a
        tensor is in two files or in another than the index says, and for quantized tensors.
        """
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, tuple[Any, str]] = {}
        files, weight_map = _files_of(path)
        for name in files:
            self._open(path / name)
        self._check_index(weight_map, files)
        self._check_scales()
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

    def _check_index(self, weight_map: Json, files: list[str]) -> None:
        """Refuse an index that does not describe the files beside it: some of them belong to another model."""
        if missing := [name for name in weight_map if name not in self._files]:
            self._stack.close()
            raise ConfigError(
                f"{self.path / INDEX} names {missing[0]}, which no file holds: the index and {', '.join(files[:4])} "
                "are of different models: download all of them again"
            )

    def _check_scales(self) -> None:
        """Refuse weights that need more than a cast: those of quantized models come with scales."""
        if scales := [name for name in self._files if name.endswith(SCALES)]:
            self._stack.close()
            raise ConfigError(
                f"{self.path}: {scales[0]} scales quantized weights, which are not supported: use weights that are not "
                "quantized"
            )

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
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object: download it again")
    return value


def _files_of(path: Path) -> tuple[list[str], Json]:
    """The safetensors files that hold the model, and the index's {tensor: file}, empty for a single file.

    Raises ConfigError where transformers would choose one of several sets of weights without a word.
    """
    present = {file.name for file in path.glob("*.safetensors") if not file.name.startswith(BESIDE)}
    has_index, has_single = (path / INDEX).is_file(), SINGLE in present
    if not has_index and not has_single:
        other = sorted(file.name for pattern in OTHER_FORMATS for file in path.glob(pattern))
        found = f" (found: {', '.join([*sorted(present), *other][:4])})" if present or other else ""
        raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}{found}: only safetensors files are supported")
    weight_map: Any = read_json(path / INDEX).get("weight_map") if has_index else {}
    if has_index and not (isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())):
        raise ConfigError(f"{path / INDEX} has no weight_map of tensors and files: download it again")
    names = sorted({*weight_map.values()}) if has_index else [SINGLE]
    if has_index and not names:
        raise ConfigError(f"{path / INDEX} names no file: download it again")
    if outside := [name for name in names if Path(name).name != name]:
        raise ConfigError(f"{path / INDEX} names {outside[0]}, which is not a file of this folder")
    if missing := [name for name in names if not (path / name).is_file()]:
        raise ConfigError(f"{path / INDEX} names {', '.join(missing)}, which are missing: download them again")
    if stale := sorted(present - {*names}):
        source = INDEX if has_index else SINGLE
        raise ConfigError(
            f"{path} has two sets of weights: {source}{f' ({names[0]}, ...)' if has_index else ''} and "
            f"{', '.join(stale[:4])}: move one of them elsewhere"
        )
    unread = sorted({file.name for pattern in UNREAD for file in path.glob(pattern)})
    if unread:
        hint(f"{path}: reads {names[0]}, not {', '.join(unread[:4])} (like transformers)", f"unread:{path}")
    return names, weight_map


BESIDE = ("consolidated", "adapter_", "optimizer")
"""First letters of the names of safetensors files that transformers does not read as the model."""
UNREAD = ("pytorch_model*.bin", "consolidated*.safetensors", "consolidated*.pth")
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack")
