"""verify --reference: compare the trainer, on any mesh, with numbers that PyTorch computed from a Hugging Face folder.

The folder holds config.json and safetensors, reference.npz (input_ids, labels [B, L] with logits [B, L, V];
train_inputs, train_labels [S, B, L] with train_loss, train_grad_norm [S], for S steps) and reference.json (loss,
grad_norm and AdamW's settings). Labels equal the inputs; -100 is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, RunConfig, validate
from jaxtrain.config.load import apply_overrides
from jaxtrain.data import IGNORE, HostBatch
from jaxtrain.hub.family import nested
from jaxtrain.hub.folder import read_json
from jaxtrain.hub.load import describe_folder, load
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.ops.zigzag import zigzag_order
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.step import compile_step

UNSCORED = -100
MICROBATCH = 2
"""Default sequences of a microbatch on each replica."""
TOLERANCES = {"parameters": 0.0, "logits": 5e-6, "loss": 2e-6, "gradient norm": 5e-6, "losses of steps": 1e-5,
              "gradient norms of steps": 1e-4}  # fmt: skip
MIXTURE_TOLERANCE = 1e-3
"""Tolerance after the first step of a mixture of experts: near ties in routing may resolve differently."""


@dataclass(frozen=True)
class ReferenceRow:
    """One comparison: the worst relative error, its location, and the computed and expected values there."""

    name: str
    got: float
    want: float
    error: float
    tolerance: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return bool(self.error <= self.tolerance)


@dataclass(frozen=True)
class ReferenceResult:
    """The comparisons of one folder on one mesh."""

    directory: Path
    mesh: dict[str, int]
    rows: tuple[ReferenceRow, ...]

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [{**asdict(row), "passed": row.passed} for row in self.rows]
        return {"directory": str(self.directory), "mesh": self.mesh, "passed": self.passed, "rows": rows}

    def table(self) -> Table:
        """A table to print."""
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        table = Table(title=f"{self.directory.name} on {sizes}")
        for name in ("", "computed", "reference", "relative error", "at most", "", "pass"):
            table.add_column(name)
        for row in self.rows:
            cells = [
                row.name,
                f"{row.got:.8g}",
                f"{row.want:.8g}",
                f"{row.error:.1e}",
                f"{row.tolerance:.0e}",
                row.where,
            ]
            table.add_row(*cells, "yes" if row.passed else "[red]NO")
        return table


def check_reference(
    directory: Path, overrides: Sequence[str] = (), devices: list[Any] | None = None
) -> ReferenceResult:
    """Compare logits, loss, gradient norm and the training curve of a folder, by default on one device.

    overrides: section.key=value, such as mesh.data=2 or rules.preset=[fsdp,tensor]. Raises ConfigError if the folder is
    incomplete or the layout impossible.
    """
    family, hub, settings = describe_folder(directory)
    numbers, arrays = read_json(directory / "reference.json"), _arrays(directory / "reference.npz")
    config = _config(nested(settings), numbers, arrays, overrides)
    setup = bind(config, _devices(config, devices))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, CheckpointOrder(setup).model_order["params"])
    params = load(directory, family, setup.canonical, hub["vocab_size"], shardings)
    later = MIXTURE_TOLERANCE if config.model.moe.experts else 0.0
    state = CheckpointOrder(setup).state_from_params(params)
    logits = _logits(setup, state["params"], batch_of(arrays["input_ids"], arrays["labels"]), arrays["logits"])
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)

    def train_step(state: Any, inputs: np.ndarray, labels: np.ndarray) -> tuple[Any, float, float]:
        batch = shard_batch(batch_of(inputs, labels), 0, setup.batch_shape, setup.batch_sharding)
        state, metrics = step(state, batch)
        return state, float(metrics["loss"]), float(metrics["grad_norm"])

    # The step donates its state.
    _, loss, norm = train_step(jax.tree.map(jnp.copy, state), arrays["input_ids"], arrays["labels"])
    curve = []
    for inputs, labels in zip(arrays["train_inputs"], arrays["train_labels"], strict=True):
        state, *values = train_step(state, inputs, labels)
        curve.append(values)
    losses, norms = np.array(curve).T
    return ReferenceResult(
        directory,
        {str(axis): size for axis, size in setup.topology.sizes.items()},
        (
            _compare("parameters", [_count_parameters(setup)], [numbers["parameters"]]),
            logits,
            _compare("loss", [loss], [numbers["loss"]]),
            _compare("gradient norm", [norm], [numbers["grad_norm"]]),
            _compare("losses of steps", losses, arrays["train_loss"], "step", later),
            _compare("gradient norms of steps", norms, arrays["train_grad_norm"], "step", later),
        ),
    )


def batch_of(inputs_BL: np.ndarray, labels_BL: np.ndarray) -> HostBatch:
    """A batch of one document a sequence, with the label of the next token at each position.

    The hub's labels [B, L] are those of the token itself.
    """
    targets_BL = np.full_like(labels_BL, IGNORE)
    targets_BL[:, :-1] = np.where(labels_BL[:, 1:] == UNSCORED, IGNORE, labels_BL[:, 1:])
    positions_BL = np.broadcast_to(np.arange(inputs_BL.shape[1]), inputs_BL.shape)
    fields = {
        "tokens": inputs_BL, "labels": targets_BL, "positions": positions_BL, "segments": np.ones_like(inputs_BL),
    }  # fmt: skip
    return {name: np.ascontiguousarray(field, np.int32) for name, field in fields.items()}


def _config(
    model: dict[str, Any], numbers: dict[str, Any], arrays: dict[str, np.ndarray], overrides: Sequence[str]
) -> RunConfig:
    train = numbers["train"]
    steps, batch, seq_len = arrays["train_inputs"].shape
    has_microbatch = any(override.startswith(("train.microbatch=", "train.accumulation=")) for override in overrides)
    tree = {
        "model": model,
        "mesh": {"data": 1},
        "rules": {"replicated_limit": 10**9},
        "data": {"seq_len": seq_len, "tokenizer": {"vocab_size": 1}},
        "train": {"steps": steps, "global_batch": batch, **({} if has_microbatch else {"microbatch": MICROBATCH})},
        "optimizer": {
            "name": "adamw", "learning_rate": train["lr"], "schedule": "constant", "beta1": train["betas"][0],
            "beta2": train["betas"][1], "eps": train["eps"], "weight_decay": train["weight_decay"],
            "clip_norm": train["clip"],
        },
    }  # fmt: skip
    return validate(apply_overrides(tree, overrides), source=f"reference {numbers.get('family', '')}".strip())


def _devices(config: RunConfig, devices: list[Any] | None) -> list[Any]:
    """The first devices that the mesh needs; all of them if an axis takes the remaining ones."""
    found = jax.devices() if devices is None else devices
    sizes = list(config.mesh.sizes.values())
    return found if -1 in sizes else found[: int(np.prod(sizes))]


def _count_parameters(setup: Bound) -> int:
    """Number of parameters as transformers counts them, without routers' correction biases."""
    flat = flatten_paths(setup.canonical.params)
    return sum(param.size for path, param in flat.items() if not path.endswith("router/correction"))


def _logits(setup: Bound, params: Any, batch: HostBatch, want_BLV: np.ndarray) -> ReferenceRow:
    def logits(fields: Any) -> jax.Array:
        with use_rules(setup.rules, setup.mesh):
            return setup.model.logits(params, fields["tokens"], fields["positions"], fields["segments"])

    sharded = shard_batch(batch, 0, setup.batch_shape, setup.batch_sharding)
    got_ABLV = np.asarray(jax.jit(lambda fields: jax.lax.map(logits, fields))(sharded))
    if setup.batch_shape.sequence_devices > 1:
        # Undo the order of tokens under context parallelism; padding is at the end.
        got_ABLV = got_ABLV[:, :, np.argsort(zigzag_order(got_ABLV.shape[2], setup.batch_shape.sequence_devices))]
    # Sequence g of the batch is sequence g // A of microbatch g mod A.
    got_BLV = got_ABLV[:, :, : want_BLV.shape[1]].swapaxes(0, 1).reshape(want_BLV.shape)
    difference = np.abs(got_BLV - want_BLV)
    at = np.unravel_index(difference.argmax(), want_BLV.shape)
    error = float(difference[at] / np.abs(want_BLV).max())
    where = f"sequence {at[0]}, position {at[1]}, entry {at[2]}"
    return ReferenceRow("logits", float(got_BLV[at]), float(want_BLV[at]), error, TOLERANCES["logits"], where)


def _compare(name: str, got: Any, want: Any, where: str = "", least_tolerance: float = 0.0) -> ReferenceRow:
    values, wanted = np.asarray(got, np.float64), np.asarray(want, np.float64)
    errors = np.abs(values - wanted) / np.abs(wanted)
    at = int(errors.argmax())
    location = f"{where} {at + 1} of {len(errors)}" if where else ""
    tolerance = max(TOLERANCES[name], least_tolerance)
    return ReferenceRow(name, float(values[at]), float(wanted[at]), float(errors[at]), tolerance, location)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable npz file ({error}): docs/hub.md describes its contents") from None
