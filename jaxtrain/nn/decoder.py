"""The decoder of every model family: families differ in ModelConfig only.

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
from jaxtrain.nn.layers import NO_TOTALS, BatchContext, BatchTotals, Embedding, Linear, Norm
from jaxtrain.nn.mtp import MTPBlock, shifted_fields
from jaxtrain.nn.stack import run_layers
from jaxtrain.numerics.remat import checkpointed
from jaxtrain.ops import rope

UNLIMITED = np.iinfo(np.int32).max
"""Window of a layer without a sliding window, where windows are scanned as data."""


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers that one scan runs: a pattern of layers that repeats.

    An entry of `pattern` is one layer of a period: its stack, and its rows of that stack over all periods.
    """

    pattern: tuple[tuple[str, slice], ...]
    periods: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.pattern) * self.periods


def layer_runs(config: ModelConfig) -> tuple[LayerRun, ...]:
    """The layers in order. A dense model has the stack "layers"; else it holds mixtures, "dense_layers" the others.

    Raises ConfigError where moe.first_dense and moe.every do not make the last layer a mixture.
    """
    moe, n = config.moe, config.n_layers
    if not moe.experts:
        return (LayerRun((("layers", slice(None)),), n),)
    mixed, dense = n - moe.first_dense, moe.every - 1
    if mixed < 1 or mixed % moe.every:
        raise ConfigError(
            f"model.moe.first_dense {moe.first_dense} and model.moe.every {moe.every} leave the last of model.n_layers "
            f"{n} layers dense: choose n_layers as first_dense plus a multiple of every"
        )
    head = (LayerRun((("dense_layers", slice(moe.first_dense)),), moe.first_dense),) if moe.first_dense else ()
    among = tuple(("dense_layers", slice(moe.first_dense + i, None, dense)) for i in range(dense))
    return *head, LayerRun((*among, ("layers", slice(None))), mixed // moe.every)


def layer_stacks(config: ModelConfig) -> tuple[str, ...]:
    """Stack of each layer, in the order of the model; the n-th layer of a stack is row n of the stack."""
    return tuple(stack for run in layer_runs(config) for _ in range(run.periods) for stack, _ in run.pattern)


def layers_of(config: ModelConfig, stack: str) -> int:
    """Number of layers in a stack."""
    return layer_stacks(config).count(stack)


def mixture_layers(config: ModelConfig) -> dict[tuple[str, ...], int]:
    """Path of each stack of mixtures in the parameters -> number of layers, in the order of `Stats`."""
    if not config.moe.experts:
        return {}
    mixtures: dict[tuple[str, ...], int] = {("layers", "mlp"): layers_of(config, "layers")}
    return mixtures | ({("mtp", "block", "mlp"): config.mtp} if config.mtp else {})


def check_segments(remat: RematConfig, config: ModelConfig) -> None:
    """Raise ConfigError where remat.every does not divide every run of layers into whole segments."""
    for run in layer_runs(config):
        if remat.every > 1 and (remat.every % len(run.pattern) or run.layers % remat.every):
            raise ConfigError(
                f"remat.every {remat.every} does not cut a run of {run.layers} layers, periods of {len(run.pattern)}: "
                "these follow from model.moe.first_dense and model.moe.every; use remat.every 1"
            )


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm, a head unless it is tied, and blocks of multi-token prediction."""

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
        """Token, position and segment ids [B, L] -> (residual stream after the final norm [B, L, D], stats)."""
        config = self.config
        context = self.context(positions_BL, segments_BL, totals)
        stacks = {
            name: nnx.split(stack) for name in ("layers", "dense_layers") if (stack := getattr(self, name)) is not None
        }
        # Windows that differ between layers are scanned, so that all layers share one body.
        windows = layer_data(config) if len(set(config.windows)) > 1 else None
        own = {"layers": jax.tree.map(lambda a: a[: layers_of(config, "layers")], totals.get("mixtures", {}))}

        def block(stack: str) -> Any:
            def run(params: Any, x_BLD: jax.Array, data: tuple[jax.Array | None, Any]) -> tuple[jax.Array, Stats]:
                window, known = data
                seen = config.windows[0] if window is None else window
                return nnx.merge(stacks[stack][0], params)(x_BLD, context, seen, known)

            return run

        x_BLD, at = self.embed_tokens(tokens_BL, positions_BL), 0
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
        return self.final_norm(x_BLD), stats

    def mtp_streams(
        self,
        x_BLD: jax.Array,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        totals: BatchTotals,
        remat: RematConfig,
    ) -> tuple[list[jax.Array], Stats]:
        """The output [B, L, D] of each depth of multi-token prediction, which the head reads, and stats [K, ...].

        `x_BLD` is the output of `__call__` for the same ids.
        """
        config = self.config
        graph, stacked = nnx.split(self.mtp)
        own = jax.tree.map(lambda a: a[layers_of(config, "layers") :], totals.get("mixtures", {}))
        window = config.windows[(config.n_layers - 1) % len(config.windows)]
        streams, reports = [], []
        for depth in range(config.mtp):
            params, known = jax.tree.map(lambda a, depth=depth: a[depth], (nnx.to_pure_dict(stacked), own))
            ids_BL, spans_BL = shifted_fields(depth + 1, segments_BL, (tokens_BL, 0), (segments_BL, 0))
            context = self.context(positions_BL, spans_BL, totals)

            def predict(
                params: Any, x_BLD: jax.Array, next_BLD: jax.Array, context: BatchContext = context, known: Any = known
            ) -> Any:
                return nnx.merge(graph, params)(x_BLD, next_BLD, context, window, known)

            # Outside a loop only a barrier keeps the compiler from replacing the recomputation by saved values.
            predict = checkpointed(predict, remat, looped=False)
            x_BLD, report = predict(params, x_BLD, self.embed_tokens(ids_BL, positions_BL))
            streams.append(x_BLD)
            reports.append(report)
        return streams, jax.tree.map(lambda *each: jnp.stack(each), *reports)

    def embed_tokens(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Token and position ids [B, L] -> residual stream before the first layer [B, L, D]."""
        # Two constraints: a table sharded over vocabulary gives partial sums of whole vectors, which are then sharded.
        x_BLD = constrain(self.embed(tokens_BL, positions_BL), "batch", "seq_len", "hidden")
        return constrain(x_BLD, "batch", "residual_seq", "hidden")

    def context(self, positions_BL: jax.Array, segments_BL: jax.Array, totals: BatchTotals = NO_TOTALS) -> BatchContext:
        """The inputs that all layers share, from position and segment ids [B, L]."""
        config = self.config
        scaling = rope.scaled(config.mla.rope_dim if config.mla.kv_rank else config.width_of_head, config.rope)
        rotation = rope.tables(positions_BL, *scaling) if config.positions == "rope" else None
        return BatchContext(segments_BL, positions_BL, rotation, totals)

    def final_norm(self, x_BLD: jax.Array) -> jax.Array:
        """Residual stream after the last layer -> input of the head [B, L, D]."""
        return normalise(self.norm, x_BLD)


def layer_data(config: ModelConfig) -> NDArray[np.int32]:
    """Window of each layer [n_layers]; the pattern of model.windows repeats over all layers, of any stack."""
    return np.resize([w or UNLIMITED for w in config.windows], config.n_layers).astype(np.int32)


def _stack(module: type[Block] | type[MTPBlock], config: ModelConfig, rngs: nnx.Rngs, n: int, mixture: bool) -> Any:
    """`n` independently initialised modules as one, whose parameters are stacked along a new first dim."""
    return nnx.vmap(lambda key: module(config, nnx.Rngs(key), mixture))(jax.random.split(rngs.params(), n))
