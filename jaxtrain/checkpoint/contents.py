"""What a checkpoint holds, read leaf by leaf: shapes, bytes, norms, and whether the digests hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.checkpoint.digest import digest_array
from jaxtrain.checkpoint.files import STATE, DamagedError, UnreadableError, describe_error, read_patiently, read_record
from jaxtrain.config import ConfigError, StorageError


def inspect_checkpoint(folder: Path) -> dict[str, Any]:
    """step, meta, bytes, intact, and `arrays`: path -> dtype and shape, bytes, norm, intact (or `error`).

    At most one leaf is in memory. Raises ConfigError where the record is damaged, StorageError if it cannot be read.
    """
    folder = folder.absolute()
    try:
        record = read_patiently(lambda: read_record(folder), f"checkpoint {folder}")
    except DamagedError as error:
        raise ConfigError(f"checkpoint {folder} is damaged: {error}") from None
    except UnreadableError as error:
        raise StorageError(f"checkpoint {folder} cannot be read: {error}") from None
    arrays = {path: _inspect_leaf(folder, path, shape, record["digests"]) for path, shape in record["leaves"].items()}
    return {
        "step": int(folder.name),
        "bytes": sum(entry["bytes"] for entry in arrays.values()),
        "intact": all(entry["intact"] for entry in arrays.values()),
        "arrays": arrays,
        "meta": record["meta"],
    }


def _inspect_leaf(folder: Path, path: str, shape: str, digests: dict[str, int]) -> dict[str, Any]:
    try:
        array = read_patiently(lambda: _read_leaf(folder, path), f"{path} of checkpoint {folder}")
    except (DamagedError, UnreadableError) as error:
        return {"array": shape, "bytes": 0, "norm": None, "intact": False, "error": describe_error(error)}
    return {"array": shape, "bytes": array.nbytes, "norm": _norm(array), "intact": digest_array(array) == digests[path]}


def _read_leaf(folder: Path, path: str) -> np.ndarray:
    args = ocp.args.PyTreeRestore(
        {path: 0}, restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
    )
    return np.asarray(ocp.PyTreeCheckpointHandler().restore(epath.Path(folder / STATE), args=args)[path])


def _norm(array: np.ndarray) -> float | None:
    """The 2-norm of a floating-point array, summed in float64 a row at a time; None for other types."""
    if array.dtype.kind not in "fV" and "float" not in array.dtype.name:
        return None
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)
    return float(np.sqrt(sum(np.sum(row.astype(np.float64) ** 2) for row in rows)))
