"""The train step: one pure function (state, batch) -> (state, metrics), the same source on 1 and on 1,024 devices.

Legend: A microbatches, B sequences, L length, R deferred replicas.

Over the *deferred* axes (batch axes that shard no weight) each replica accumulates its own gradient: the microbatch is
vmapped over those axes. Their sum after the last microbatch is the only reduction of a step, an all-reduce or, where
the gradient is sharded, a reduce-scatter. Axes that shard weights (ZeRO-3) reduce inside the microbatch.
The loss is the sum over scored tokens divided by their number in the whole global batch, known before the first
microbatch: there is no mean of means, and float16 cotangents have the size of one token's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import Axis, RunConfig
from jaxtrain.mesh.constraints import REPLICAS, use_rules
from jaxtrain.mesh.layout import Layout
from jaxtrain.mesh.rules import Rules
from jaxtrain.mesh.shard_map import replicated_over
from jaxtrain.nn.model import Model
from jaxtrain.nn.moe import expert_capacity
from jaxtrain.nn.mtp import mtp_labels
from jaxtrain.numerics import scaling
from jaxtrain.numerics.counter import counter_add, counter_float
from jaxtrain.numerics.precision import Precision
from jaxtrain.numerics.wide import operand, weights_of
from jaxtrain.ops.attention import use_attention
from jaxtrain.ops.loss import IGNORE
from jaxtrain.ops.low_precision import use_recipe
from jaxtrain.optim import all_finite, clip_scale, global_norm, learning_rate
from jaxtrain.pipeline.chunk import Chunk
from jaxtrain.pipeline.execute import Pipeline
from jaxtrain.pipeline.schedule import forward_schedule, make_schedule
from jaxtrain.pipeline.staged import StagedModel
from jaxtrain.pipeline.table import PipelineShape
from jaxtrain.train.experts import balanced, expert_metrics, needs_loads
from jaxtrain.train.guard import GUARD, is_spike, next_history
from jaxtrain.train.losses import LOSSES, HeadInputs, Sums, metric_sums
from jaxtrain.train.options import compiler_options, run_options
from jaxtrain.train.state import TrainState

Batch = dict[str, jax.Array]
Tree = Any

MTP = "mtp"
"""Key among the sums of a head: what the blocks of multi-token prediction report, stacked over depths."""


@dataclass(frozen=True)
class Step:
    """What the step closes over; `train_step` and `evaluate` are pure functions, ready for jit."""

    config: RunConfig
    model: Model
    optimizer: optax.GradientTransformation
    layout: Layout
    rules: Rules
    mesh: Mesh
    seq_len: int
    """Tokens of a sequence in the phase of data.schedule that this step trains, without the padding of a layout."""

    @cached_property
    def precision(self) -> Precision:
        """Dtypes of this run."""
        return Precision(self.config.precision)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step from a [A, B, L] batch; returns the new state and the step's metrics.

        A step without any scored token, with a loss, gradient or result that is not finite, or with a spike
        (train/guard.py), changes nothing but the scaler's counters.
        """
        config, params, scaler = self.config, state["params"], state["scaler"]
        scored = jnp.sum(batch["labels"] != IGNORE, dtype=jnp.int32)
        gradients, sums = self.gradients(params, batch, scaler["scale"])
        gradients = jax.tree.map(lambda g: g / scaler["scale"], gradients)
        norm = global_norm(gradients)
        clip = clip_scale(norm, config.optimizer.clip_norm)
        tokens = counter_add(state["tokens"], scored)
        rate = learning_rate(config.optimizer, config.train.steps, state["steps"], counter_float(tokens))
        shards = partial(self._pin, specs=self.layout.optimizer)
        direction, opt = self.optimizer.update(
            shards(jax.tree.map(lambda g: g * clip, gradients)), state["opt"], shards(params)
        )
        stepped = jax.tree.map(lambda p, d: p - rate * d, shards(params), direction)
        if config.model.moe.experts:
            stepped = balanced(stepped, self.model, sums["load"])
        loss = sums["loss"] / jnp.maximum(scored, 1)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss) & all_finite((stepped, opt))
        apply, guard, guarded = finite & (scored > 0), {}, {}
        if GUARD in state:
            guarded = {"spike": apply & is_spike(config.guard, state[GUARD], loss, norm)}
            apply &= ~guarded["spike"]
            guard = {GUARD: next_history(state[GUARD], loss, norm, apply)}
        keep = partial(jax.tree.map, lambda new, old: jnp.where(apply, new, old))
        new_state = {
            "params": self._pin(keep(stepped, params), self.layout.master_params),
            "opt": keep(opt, state["opt"]),
            "scaler": scaling.next_state(config.precision, scaler, finite, apply | (finite & (scored == 0))),
            "steps": state["steps"] + apply,
            "tokens": jnp.where(apply, tokens, state["tokens"]),
            **guard,
        }
        metrics: dict[str, jax.Array] = {
            "loss": loss,
            **({"z_loss": sums["z_loss"] / jnp.maximum(scored, 1)} if "z_loss" in sums else {}),
            "scored_tokens": scored,
            "fill": self._fill(batch),
            "grad_norm": norm,
            "learning_rate": rate,
            "loss_scale": scaler["scale"],
            "applied": apply,
            "skipped_in_a_row": new_state["scaler"]["skipped"],
            **guarded,
            **expert_metrics(sums),
            **{name: sums[f"metric/{name}"] / jnp.maximum(scored, 1) for name in config.train.metrics},
        }
        if "mtp_loss" in sums:
            metrics["mtp_loss"] = jnp.mean(sums["mtp_loss"] / jnp.maximum(sums["mtp_scored"], 1))
        return new_state, metrics

    def evaluate(self, params: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of the loss and number of scored tokens over a [A, B, L] batch."""
        sums = self._forward(self._weights(params), batch, self.totals(batch), "loss", "scored")
        return sums["loss"], sums["scored"]

    def totals(self, batch: Batch) -> Tree:
        """Counts over a global batch, known before its first microbatch: the divisors of every mean."""
        real = batch["segments"] > 0
        counts = {"scored": batch["labels"] != IGNORE, "tokens": real, "rows": jnp.any(real, axis=-1)}
        totals = {name: jnp.maximum(jnp.sum(each, dtype=jnp.int32), 1) for name, each in counts.items()}
        if (capacity := expert_capacity(self.config.model, self.seq_len)) is not None:
            totals["capacity"] = jnp.int32(capacity)
        if depths := self.config.model.mtp:
            with use_rules(self.rules, self.mesh):
                scored = mtp_labels(batch["labels"], batch["segments"], depths) != IGNORE
            totals["mtp_scored"] = jnp.maximum(jnp.sum(scored, axis=(1, 2, 3), dtype=jnp.int32), 1)
        return totals

    def gradients(self, params: Tree, batch: Batch, scale: jax.Array | float) -> tuple[Tree, Sums]:
        """float32 gradients of scale x (mean loss + auxiliary losses), in the gradients' sharding, and sums.

        params: float32 master parameters; batch fields: [A, B, L]. The sums are over the global batch: "loss", "scored"
        and what layers report.
        """
        weights, totals = self._weights(params), self.totals(batch)
        if self.counts_first(batch["tokens"].shape[0]):
            totals |= {"mixtures": self._forward(weights, batch, totals, "load")}
        if self.replicas > 1:
            batch = jax.tree.map(self._by_replica, batch)
        if isinstance(self.model, StagedModel):
            gradients, sums = self._pipelined(self.model, weights, batch, totals, scale)
        else:
            gradients, sums = self._accumulated(weights, batch, totals, scale)
        if self.replicas > 1:
            gradients, sums = jax.tree.map(self._reduce, gradients), {k: jnp.sum(s, axis=0) for k, s in sums.items()}
        return self._pin(gradients, self.layout.gradients), sums

    def _accumulated(self, weights: Tree, batch: Batch, totals: Tree, scale: jax.Array | float) -> tuple[Tree, Sums]:
        """Gradients and sums, summed over microbatches; each replica for itself."""

        wide = self.precision.wide_gradients
        variable = operand(weights, wide)

        def scaled(variable: Tree, fields: Batch) -> tuple[jax.Array, Sums]:
            with self._tracing(self.layout.deferred_axes):
                return self._objective(weights_of(variable, weights, wide), fields, totals, scale)

        grad: Callable[..., Any] = jax.grad(scaled, has_aux=True)
        lead: tuple[int, ...] = ()
        if self.replicas > 1:
            grad = jax.vmap(grad, in_axes=(None, 0), axis_name=REPLICAS, spmd_axis_name=self.layout.deferred_axes)
            lead = (self.replicas,)

        def microbatch(total: Tree, fields: Batch) -> tuple[Tree, Sums]:
            gradient, sums = grad(variable, fields)
            summed = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient)
            return self._pin(summed, self._summed), sums

        zeros = jax.tree.map(lambda w: jnp.zeros(lead + w.shape, jnp.float32), weights)
        gradients, sums = _scan(microbatch, self._pin(zeros, self._summed), batch)
        return gradients, {name: jnp.sum(s, axis=0) for name, s in sums.items()}

    def _pipelined(
        self, model: StagedModel, weights: Tree, batch: Batch, totals: Tree, scale: jax.Array | float
    ) -> tuple[Tree, Sums]:
        """Like `_accumulated`, with microbatches that flow through the stages of the pipe axis."""
        schedule = make_schedule(self.config.pipeline.schedule, self._shape(model, batch))

        def replica(weights: Tree, batch: Batch) -> tuple[Tree, Sums]:
            with self._tracing(self.layout.deferred_axes):
                head = partial(self._head, totals=totals, scale=scale)
                gradients, sums = self._pipeline(model, weights, batch, totals).gradients(schedule, head, scale)
            return gradients, _join_mtp(sums)

        if self.replicas > 1:
            replica = jax.vmap(replica, in_axes=(None, 1), axis_name=REPLICAS, spmd_axis_name=self.layout.deferred_axes)
        gradients, sums = replica(weights, batch)
        return self._pin(gradients, self._summed), sums

    def _pipeline(self, model: StagedModel, weights: Tree, batch: Batch, totals: Tree) -> Pipeline:
        wide = self.precision.wide_gradients
        chunk = Chunk(model, model.stages, weights, self.layout.weights, totals, self.config.remat, wide)
        return Pipeline(chunk, batch)

    @staticmethod
    def _shape(model: StagedModel, batch: Batch) -> PipelineShape:
        stages, chunks, _ = model.stages.shape
        return PipelineShape(stages, chunks, batch["tokens"].shape[0])

    def counts_first(self, accumulation: int) -> bool:
        """Whether a step has a forward pass before its first microbatch, which counts the loads of experts.

        A balancing loss over the global batch multiplies each microbatch's share by the load of all of them.
        """
        return needs_loads(self.config.model) and (accumulation > 1 or bool(self.layout.deferred_axes))

    def _forward(self, weights: Tree, batch: Batch, totals: Tree, *names: str) -> Sums:
        """The sums `names` over a [A, B, L] batch, without gradients; MTP blocks run only where loads are asked for."""
        with_mtp = "load" in names
        if isinstance(self.model, StagedModel):
            head = partial(self._head, totals=totals, scale=1.0, with_mtp=with_mtp)
            with self._tracing():
                pipeline = self._pipeline(self.model, weights, batch, totals)
                sums = _join_mtp(pipeline.forward(forward_schedule(self._shape(self.model, batch)), head))
            return {name: sums[name] for name in names}

        def body(_: None, fields: Batch) -> tuple[None, Sums]:
            with self._tracing():
                sums = self._objective(weights, fields, totals, 1.0, with_mtp)[1]
            return None, {name: sums[name] for name in names}

        return {name: jnp.sum(s, axis=0) for name, s in _scan(body, None, batch)[1].items()}

    def _objective(
        self, weights: Tree, fields: Batch, totals: Tree, scale: jax.Array | float, with_mtp: bool = True
    ) -> tuple[jax.Array, Sums]:
        """A microbatch's share of scale x (mean loss + auxiliary losses), and its sums."""
        x_BLD, stats = self.model.hidden(
            weights, fields["tokens"], fields["positions"], fields["segments"], self.config.remat, totals
        )
        objective, sums = self._score(weights, x_BLD, fields, totals, scale, with_mtp)
        return objective + scale * jnp.sum(stats.get("objective", 0.0)), _join_mtp(sums | stats)

    def _head(
        self,
        weights: Tree,
        x_BLD: jax.Array,
        fields: Batch,
        totals: Tree,
        scale: jax.Array | float,
        with_mtp: bool = True,
    ) -> tuple[jax.Array, Tree]:
        """`_score` of the residual stream after the last layer."""
        return self._score(weights, self.model.final_norm(weights, x_BLD), fields, totals, scale, with_mtp)

    def _score(
        self, weights: Tree, x_BLD: jax.Array, fields: Batch, totals: Tree, scale: jax.Array | float, with_mtp: bool
    ) -> tuple[jax.Array, Tree]:
        """A microbatch's share of scale x mean loss, multi-token prediction included, and its sums.

        The stats of the MTP blocks are under the key MTP.
        """
        inputs = HeadInputs(self.config, x_BLD, self.model.head(weights), fields, self._batch_shards)
        loss, sums = LOSSES[self.config.train.loss](inputs)
        sums = sums | metric_sums(inputs)
        # One factor: a float16 cotangent then has the size of one token's share.
        objective = loss * (scale / totals["scored"])
        if not (with_mtp and self.config.model.mtp):
            return objective, sums
        # The MTP blocks belong to no stage: every stage runs them.
        with replicated_over("pipe"):
            share, mtp_sums, stats = self.model.mtp_loss(
                weights, x_BLD, fields, self.config.remat, totals, self._batch_shards
            )
        objective += scale * (share + jnp.sum(stats.get("objective", 0.0)))
        return objective, {**sums, **mtp_sums, MTP: stats}

    def _fill(self, batch: Batch) -> jax.Array:
        """Share of the tokens that are not padding."""
        accumulation, sequences, _ = batch["segments"].shape
        return jnp.sum(batch["segments"] > 0, dtype=jnp.int32) / (accumulation * sequences * self.seq_len)

    @contextmanager
    def _tracing(self, without: Iterable[Axis] = ()) -> Iterator[None]:
        """What modules read while they are traced; axes in `without` belong to an enclosing vmap."""
        with use_rules(self.rules, self.mesh, without), use_attention(self.config), use_recipe(self.config.precision):
            yield

    @property
    def replicas(self) -> int:
        """Devices along the deferred axes: each accumulates its own gradient until the end of the step."""
        return math.prod(self.mesh.shape[axis] for axis in self.layout.deferred_axes)

    @cached_property
    def _summed(self) -> Tree:
        """Specs of gradients before their reduction, with a leading dimension of replicas where there are several."""
        if self.replicas == 1:
            return self.layout.gradients
        return jax.tree.map(lambda s: PartitionSpec(self.layout.deferred_axes, *s), self.layout.weights)

    @property
    def _batch_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self._undeferred)

    @property
    def _undeferred(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.layout.batch_axes if axis not in self.layout.deferred_axes)

    def _weights(self, params: Tree) -> Tree:
        return self._pin(self.precision.cast(params), self.layout.weights)

    def _by_replica(self, field_ABL: jax.Array) -> jax.Array:
        a, b, length = field_ABL.shape
        spec = PartitionSpec(
            None, self.layout.deferred_axes, self._undeferred or None, self.layout.sequence_axes or None
        )
        split = field_ABL.reshape(a, self.replicas, b // self.replicas, length)
        return lax.with_sharding_constraint(split, NamedSharding(self.mesh, spec))

    def _reduce(self, gradient_R: jax.Array) -> jax.Array:
        dtype = self.precision.reduce
        # jnp.sum would widen bfloat16 before the all-reduce: lax.reduce keeps the dtype that is sent.
        zero = jnp.zeros((), dtype)
        return lax.reduce(gradient_R.astype(dtype), zero, lax.add, (0,)).astype(jnp.float32)

    def _pin(self, tree: Tree, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf, spec: lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec)), tree, specs
        )


def _join_mtp(sums: Tree) -> Sums:
    """Sums in which the stats of the MTP blocks follow those of the layers."""
    with_mtp = sums.get(MTP, {})
    return {
        name: jnp.concatenate([value, with_mtp[name]]) if name in with_mtp else value
        for name, value in sums.items()
        if name != MTP
    }


def _scan(body: Callable[..., Any], carry: Any, xs: Batch) -> Any:
    # A loop of one iteration would prevent fusion and hold a second gradient buffer.
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda x: x[None], out)
    return lax.scan(body, carry, xs)


def jit_evaluate(step: Step) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`Step.evaluate`, compiled at its first batch."""
    return jax.jit(step.evaluate, compiler_options=compiler_options({}, step.mesh) or None)


def compile_step(step: Step, abstract: TrainState, batch: Batch, donate: bool = True) -> jax.stages.Compiled:
    """Compile `Step.train_step` for these shapes and shardings, with the xla options; a mismatch is an error."""
    options = compiler_options(run_options(step.config), step.mesh)
    return lower_step(step, abstract, batch, donate).compile(compiler_options=options or None)


def lower_step(step: Step, abstract: TrainState, batch: Batch, donate: bool = True) -> jax.stages.Lowered:
    """`Step.train_step` traced and lowered for these shapes and shardings; the state is donated unless told not to."""
    replicated = NamedSharding(step.mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    donated = 0 if donate else ()
    jitted = jax.jit(step.train_step, donate_argnums=donated, out_shardings=(shardings, replicated))
    return jitted.lower(abstract, batch)
