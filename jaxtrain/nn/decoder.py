"""One decoder for every family: what differs between families is data in ModelConfig.

B batch, L length, D model, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from jaxtrain.config import ConfigError, ModelConfig, RematConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.block import Block, Stats, normalise
from jaxtrain.nn.layers import NOTHING, BatchTotals, Embedding, Flow, Linear, Norm
from jaxtrain.nn.mtp import MTPBlock, shifted_fields
from jaxtrain.nn.stack import run_layers
from jaxtrain.numerics.remat import checkpointed
from jaxtrain.ops import rope

UNLIMITED = np.iinfo(np.int32).max
"""Window of a layer that sees everything before it."""


@dataclass(frozen=True)
class Run:
    """Layers that are scanned together: for each layer of one period its stack and its rows there, and the periods."""

    pattern: tuple[tuple[str, slice], ...]
    periods: int

    @property
    def layers(self) -> int:
        """Layers of the run."""
        return len(self.pattern) * self.periods


def layer_runs(config: ModelConfig) -> tuple[Run, ...]:
    """The order of the layers: a dense model is one run of "layers"; else those are the mixtures, among dense_layers.

    Raises ConfigError where moe.first_dense and moe.every do not end in a mixture.
    """
    moe, n = config.moe, config.n_layers
    if not moe.experts:
        return (Run((("layers", slice(None)),), n),)
    mixed, dense = n - moe.first_dense, moe.every - 1
    if mixed < 1 or mixed % moe.every:
        raise ConfigError(
            f"model.moe.first_dense {moe.first_dense} and model.moe.every {moe.every} leave the last of model.n_layers "
            f"{n} layers dense: choose n_layers as first_dense plus a multiple of every"
        )
    head = (Run((("dense_layers", slice(moe.first_dense)),), moe.first_dense),) if moe.first_dense else ()
    among = tuple(("dense_layers", slice(moe.first_dense + i, None, dense)) for i in range(dense))
    return *head, Run((*among, ("layers", slice(None))), mixed // moe.every)


def layer_stacks(config: ModelConfig) -> tuple[str, ...]:
    """Stack of each layer, in the model's order; the n-th layer of a stack is its row n."""
    return tuple(stack for run in layer_runs(config) for _ in range(run.periods) for stack, _ in run.pattern)


def layers_of(config: ModelConfig, stack: str) -> int:
    """Number of layers of a stack."""
    return layer_stacks(config).count(stack)


def mixture_layers(config: ModelConfig) -> dict[tuple[str, ...], int]:
    """Path of each stack of mixtures in the parameters -> its layers, in the order in which `Stats` come."""
    if not config.moe.experts:
        return {}
    mixtures: dict[tuple[str, ...], int] = {("layers", "mlp"): layers_of(config, "layers")}
    return mixtures | ({("mtp", "block", "mlp"): config.mtp} if config.mtp else {})


def check_segments(remat: RematConfig, config: ModelConfig) -> None:
    """Raise ConfigError where remat.every does not cut every run of layers into whole segments."""
    for run in layer_runs(config):
        if remat.every > 1 and (remat.every % len(run.pattern) or run.layers % remat.every):
            raise ConfigError(
                f"remat.every {remat.every} does not cut a run of {run.layers} layers in periods of {len(run.pattern)} "
                "into whole segments (model.moe.first_dense and model.moe.every make such runs): use remat.every 1"
            )


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm, (unless tied) a head, and blocks that predict further tokens."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, V, mixture = config.d_model, config.vocab_size, config.moe.experts > 0
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = _stack(Block, config, rngs, layers_of(config, "layers"), mixture)
        dense = layers_of(config, "dense_layers")
        self.dense_layers = _stack(Block, config, rngs, dense, False) if dense else None
        self.norm = Norm(config.norm, D, ("norm",), config.norm_eps)
        head = None if config.tied_head else Linear(
            rngs, "BLD,DV->BLV", (D, V), ("embed", "vocab"), config.init_std, None
        )  # fmt: skip
        self.head = head
        self.mtp: Any = _stack(MTPBlock, config, rngs, config.mtp, mixture) if config.mtp else None

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        totals: BatchTotals,
        remat: RematConfig,
    ) -> tuple[jax.Array, Stats]:
        """Token, position and segment ids [B, L] -> the residual stream after the final norm [B, L, D], and stats."""
        config = self.config
        flow = self.flow(positions_BL, segments_BL, totals)
        stacks = {
            name: nnx.split(stack) for name in ("layers", "dense_layers") if (stack := getattr(self, name)) is not None
        }
        # Windows that differ are scanned data, so that one body serves all layers.
        windows = layer_data(config) if len(set(config.windows)) > 1 else None
        own = {"layers": jax.tree.map(lambda a: a[: layers_of(config, "layers")], totals.get("mixtures", {}))}

        def block(stack: str) -> Any:
            def run(params: Any, x_BLD: jax.Array, data: tuple[jax.Array | None, Any]) -> tuple[jax.Array, Stats]:
                window, known = data
                seen = config.windows[0] if window is None else window
                return nnx.merge(stacks[stack][0], params)(x_BLD, flow, seen, known)

            return run

        x_BLD, at = self.enter(tokens_BL, positions_BL), 0
        stats: Stats = {}
        for run in layer_runs(config):
            params = [
                jax.tree.map(lambda a, rows=rows: a[rows], nnx.to_pure_dict(stacks[stack][1]))
                for stack, rows in run.pattern
            ]
            here_NP = None if windows is None else windows[at : at + run.layers].reshape(run.periods, -1)
            data = [
                (None if here_NP is None else jnp.asarray(here_NP[:, place]), own.get(stack, {}))
                for place, (stack, _) in enumerate(run.pattern)
            ]
            x_BLD, reports = run_layers([block(stack) for stack, _ in run.pattern], params, x_BLD, data, remat)
            at += run.layers
            for report in reports:
                stats |= report
        return self.leave(x_BLD), stats

    def further(
        self,
        x_BLD: jax.Array,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        totals: BatchTotals,
        remat: RematConfig,
    ) -> tuple[list[jax.Array], Stats]:
        """The stream [B, L, D] from which each depth of multi-token prediction reads one further token, and stats.

        `x_BLD` is what `__call__` gave for these ids.
        """
        config = self.config
        graph, stacked = nnx.split(self.mtp)
        own = jax.tree.map(lambda a: a[layers_of(config, "layers") :], totals.get("mixtures", {}))
        window = config.windows[(config.n_layers - 1) % len(config.windows)]
        streams, reports = [], []
        for depth in range(config.mtp):
            params, known = jax.tree.map(lambda a, depth=depth: a[depth], (nnx.to_pure_dict(stacked), own))
            ids_BL, spans_BL = shifted_fields(depth + 1, segments_BL, (tokens_BL, 0), (segments_BL, 0))
            flow = self.flow(positions_BL, spans_BL, totals)

            def predict(
                params: Any, x_BLD: jax.Array, next_BLD: jax.Array, flow: Flow = flow, known: Any = known
            ) -> Any:
                return nnx.merge(graph, params)(x_BLD, next_BLD, flow, window, known)

            # Outside of any loop: only a barrier keeps the compiler from sharing what is to be recomputed.
            predict = checkpointed(predict, remat, looped=False)
            x_BLD, report = predict(params, x_BLD, self.enter(ids_BL, positions_BL))
            streams.append(x_BLD)
            reports.append(report)
        return streams, jax.tree.map(lambda *each: jnp.stack(each), *reports)

    def enter(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Token and position ids [B, L] -> the residual stream before the first layer [B, L, D]."""
        # Two steps: a table split over vocabulary sums whole rows, which are then scattered over the residual's shards.
        x_BLD = constrain(self.embed(tokens_BL, positions_BL), "batch", "seq_len", "hidden")
        return constrain(x_BLD, "batch", "residual_seq", "hidden")

    def flow(self, positions_BL: jax.Array, segments_BL: jax.Array, totals: BatchTotals = NOTHING) -> Flow:
        """What every layer sees of the batch, from position and segment ids [B, L]."""
        config = self.config
        turning = rope.scaled(config.mla.rope_dim if config.mla.kv_rank else config.width_of_head, config.rope)
        rotation = rope.tables(positions_BL, *turning) if config.positions == "rope" else None
        return Flow(segments_BL, positions_BL, rotation, totals)

    def leave(self, x_BLD: jax.Array) -> jax.Array:
        """The residual stream after the last layer -> what the head reads [B, L, D]."""
        return normalise(self.norm, x_BLD)


def layer_data(config: ModelConfig) -> NDArray[np.int32]:
    """Window of each layer [n_layers]: the pattern repeats over all layers, whatever their stack."""
    return np.resize([w or UNLIMITED for w in config.windows], config.n_layers).astype(np.int32)


def _stack(module: type[Block] | type[MTPBlock], config: ModelConfig, rngs: nnx.Rngs, n: int, mixture: bool) -> Any:
    """`n` modules, each of random numbers of its own, as one whose parameters have them as first dim."""
    return nnx.vmap(lambda key: module(config, nnx.Rngs(key), mixture))(jax.random.split(rngs.params(), n))
