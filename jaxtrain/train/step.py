"""The train step: one pure function (state, batch) -> (state, metrics), the same source on 1 and on 1,024 devices.

Legend: A microbatches, B rows, L length, R deferred replicas.

Gradients over the *deferred* axes (batch axes that shard no weight) are kept apart, one a replica, by vmapping the
microbatch over those axes; their sum after the last microbatch is the only reduction of an update, an all-reduce
or, where the gradient is sharded, a reduce-scatter. Axes that shard weights (ZeRO-3) reduce inside the microbatch.
The loss is the sum over scored tokens divided by their number in the whole global batch, known before the first
microbatch, so that no mean of means can arise and float16 cotangents keep a per-token size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import Axis, RunConfig
from jaxtrain.mesh.layout import Layout
from jaxtrain.mesh.rules import Rules, use_rules
from jaxtrain.nn.model import Model
from jaxtrain.nn.mtp import further_labels
from jaxtrain.numerics import scaling
from jaxtrain.numerics.counter import counter_add, counter_float
from jaxtrain.numerics.precision import Precision
from jaxtrain.ops.attention import use_attention
from jaxtrain.ops.loss import IGNORE, loss_sums
from jaxtrain.optim import clip_scale, global_norm, learning_rate
from jaxtrain.train.experts import balanced, expert_metrics, needs_loads
from jaxtrain.train.options import compiler_options
from jaxtrain.train.state import State

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]
Tree = Any


@dataclass(frozen=True)
class Step:
    """Everything that the step closes over; `update` and `evaluate` are pure and ready for jit."""

    config: RunConfig
    model: Model
    optimizer: optax.GradientTransformation
    layout: Layout
    rules: Rules
    mesh: Mesh

    @cached_property
    def precision(self) -> Precision:
        """Dtypes of this run."""
        return Precision(self.config.precision)

    def update(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """One optimizer update from a [A, B, L] batch; scalars of the update as metrics.

        An update with a non-finite gradient or without any scored token changes nothing but the scaler's counters.
        """
        config, params, scaler = self.config, state["params"], state["scaler"]
        scored = jnp.sum(batch["labels"] != IGNORE, dtype=jnp.int32)
        gradients, sums = self.gradients(params, batch, scaler["scale"])
        gradients = jax.tree.map(lambda g: g / scaler["scale"], gradients)
        norm = global_norm(gradients)
        finite = jnp.isfinite(norm)
        apply = finite & (scored > 0)
        clip = clip_scale(norm, config.optimizer.clip_norm)
        tokens = counter_add(state["tokens"], jnp.where(apply, scored, 0))
        rate = learning_rate(config.optimizer, config.train.updates, state["updates"], counter_float(tokens))
        shards = partial(self._pin, specs=self.layout.optimizer)
        direction, opt = self.optimizer.update(
            shards(jax.tree.map(lambda g: g * clip, gradients)), state["opt"], shards(params)
        )
        stepped = jax.tree.map(lambda p, d: p - rate * d, shards(params), direction)
        stepped = balanced(stepped, config.model, sums["load"]) if config.model.moe.experts else stepped
        keep = partial(jax.tree.map, lambda new, old: jnp.where(apply, new, old))
        new_state = {
            "params": self._pin(keep(stepped, params), self.layout.masters),
            "opt": keep(opt, state["opt"]),
            "scaler": scaling.update(config.precision, scaler, finite),
            "updates": state["updates"] + apply,
            "tokens": tokens,
        }
        metrics: dict[str, jax.Array] = {
            **{name: sums[name] / jnp.maximum(scored, 1) for name in ("loss", "z_loss") if name in sums},
            "scored_tokens": scored,
            "fill": jnp.mean(batch["segments"] > 0, dtype=jnp.float32),
            "grad_norm": norm,
            "learning_rate": rate,
            "loss_scale": scaler["scale"],
            "applied": apply,
            "skipped_in_a_row": new_state["scaler"]["skipped"],
            **expert_metrics(sums),
        }
        if "mtp_loss" in sums:
            metrics["mtp_loss"] = jnp.mean(sums["mtp_loss"] / jnp.maximum(sums["mtp_scored"], 1))
        return new_state, metrics

    def evaluate(self, params: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of the loss and number of scored tokens over a [A, B, L] batch."""
        sums = self._forward(self._weights(params), batch, self.totals(batch), "loss", "scored")
        return sums["loss"], sums["scored"]

    def totals(self, batch: Batch) -> Tree:
        """What is known of a global batch before its first microbatch: the divisors of every mean."""
        real = batch["segments"] > 0
        counts = {"scored": batch["labels"] != IGNORE, "tokens": real, "rows": jnp.any(real, axis=-1)}
        totals = {name: jnp.maximum(jnp.sum(each, dtype=jnp.int32), 1) for name, each in counts.items()}
        if depths := self.config.model.mtp:
            scored = further_labels(batch["labels"], batch["segments"], depths) != IGNORE
            totals["mtp_scored"] = jnp.maximum(jnp.sum(scored, axis=(1, 2, 3), dtype=jnp.int32), 1)
        return totals

    def gradients(self, params: Tree, batch: Batch, scale: jax.Array | float) -> tuple[Tree, Sums]:
        """float32 gradients of scale x (mean loss + auxiliary losses), in the gradients' sharding, and sums.

        params: float32 masters; batch fields: [A, B, L]. The sums run over the global batch: "loss", "scored" and what
        layers report.
        """
        weights, totals = self._weights(params), self.totals(batch)
        replicas = math.prod(self.mesh.shape[axis] for axis in self.layout.deferred_axes)
        if self.counts_first(batch["tokens"].shape[0]):
            totals |= {"mixtures": self._forward(weights, batch, totals, "load")}

        def scaled(weights: Tree, rows: Batch) -> tuple[jax.Array, Sums]:
            with use_rules(self.rules, self.mesh, without=self.layout.deferred_axes), use_attention(self.config):
                return self._objective(weights, rows, totals, scale)

        grad: Callable[..., Any] = jax.grad(scaled, has_aux=True)
        specs = self.layout.gradients
        if replicas > 1:
            grad = jax.vmap(grad, in_axes=(None, 0), spmd_axis_name=self.layout.deferred_axes)
            specs = jax.tree.map(lambda s: PartitionSpec(self.layout.deferred_axes, *s), self.layout.weights)
            batch = jax.tree.map(partial(self._by_replica, replicas=replicas), batch)

        def microbatch(total: Tree, rows: Batch) -> tuple[Tree, Sums]:
            gradient, sums = grad(weights, rows)
            summed = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient)
            return self._pin(summed, specs), sums

        lead = (replicas,) if replicas > 1 else ()
        zeros = jax.tree.map(lambda p: jnp.zeros(lead + p.shape, jnp.float32), params)
        gradients, sums = _scan(microbatch, self._pin(zeros, specs), batch)
        # Each sum comes once a microbatch, and once a replica within it.
        sums = {name: jnp.sum(s, axis=(0, 1) if replicas > 1 else 0) for name, s in sums.items()}
        if replicas > 1:
            gradients = jax.tree.map(self._reduce, gradients)
        return self._pin(gradients, self.layout.gradients), sums

    def counts_first(self, accumulation: int) -> bool:
        """Whether an update has a forward pass before its first microbatch, which counts the loads of experts.

        A balancing loss over the global batch multiplies each microbatch's share by the load of all of them.
        """
        return needs_loads(self.config.model) and (accumulation > 1 or bool(self.layout.deferred_axes))

    def _forward(self, weights: Tree, batch: Batch, totals: Tree, *names: str) -> Sums:
        """Some of the sums over a [A, B, L] batch, without gradients."""

        def body(_: None, rows: Batch) -> tuple[None, Sums]:
            with use_rules(self.rules, self.mesh), use_attention(self.config):
                sums = self._objective(weights, rows, totals, 1.0)[1]
            return None, {name: sums[name] for name in names}

        return {name: jnp.sum(s, axis=0) for name, s in _scan(body, None, batch)[1].items()}

    def _objective(self, weights: Tree, rows: Batch, totals: Tree, scale: jax.Array | float) -> tuple[jax.Array, Sums]:
        """A microbatch's share of scale x (mean loss + auxiliary losses), and its sums."""
        x_BLD, stats = self.model.hidden(
            weights, rows["tokens"], rows["positions"], rows["segments"], self.config.remat, totals
        )
        shards = math.prod(self.mesh.shape[axis] for axis in self._undeferred)
        softcap, z_weight = self.config.model.logit_softcap, self.config.train.z_loss
        loss, sums = loss_sums(x_BLD, self.model.head(weights), rows["labels"], softcap, shards, z_weight)
        # One factor: a float16 cotangent keeps the size of a token's share.
        objective = loss * (scale / totals["scored"])
        if self.config.model.mtp:
            share, further, layers = self.model.further_loss(weights, x_BLD, rows, self.config.remat, totals, shards)
            objective, sums = objective + scale * share, sums | further
            stats = {name: jnp.concatenate([value, layers[name]]) for name, value in stats.items()}
        return objective + scale * jnp.sum(stats.get("objective", 0.0)), sums | stats

    @property
    def _undeferred(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.layout.batch_axes if axis not in self.layout.deferred_axes)

    def _weights(self, params: Tree) -> Tree:
        return self._pin(self.precision.cast(params), self.layout.weights)

    def _by_replica(self, field_ABL: jax.Array, replicas: int) -> jax.Array:
        a, b, length = field_ABL.shape
        spec = PartitionSpec(None, self.layout.deferred_axes, self._undeferred or None, self.layout.length_axes or None)
        split = field_ABL.reshape(a, replicas, b // replicas, length)
        return lax.with_sharding_constraint(split, NamedSharding(self.mesh, spec))

    def _reduce(self, gradient_R: jax.Array) -> jax.Array:
        dtype = self.precision.reduce
        # jnp.sum would widen bfloat16 before the all-reduce: lax.reduce keeps the wire's dtype.
        zero = jnp.zeros((), dtype)
        return lax.reduce(gradient_R.astype(dtype), zero, lax.add, (0,)).astype(jnp.float32)

    def _pin(self, tree: Tree, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf, spec: lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec)), tree, specs
        )


def _scan(body: Callable[..., Any], carry: Any, xs: Batch) -> Any:
    # A loop of one iteration hides the microbatch from fusion and keeps a second gradient buffer alive.
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda x: x[None], out)
    return lax.scan(body, carry, xs)


def jit_evaluate(step: Step) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`evaluate`, compiled at its first batch."""
    return jax.jit(step.evaluate, compiler_options=compiler_options({}, step.mesh) or None)


def compile_step(step: Step, abstract: State, batch: Batch) -> jax.stages.Compiled:
    """Compile `update` once for these shapes and shardings, with the config's xla options; a mismatch is an error."""
    options = compiler_options(step.config.xla, step.mesh)
    return lower_step(step, abstract, batch).compile(compiler_options=options or None)


def lower_step(step: Step, abstract: State, batch: Batch) -> jax.stages.Lowered:
    """`update` traced and lowered for these shapes and shardings, the state donated."""
    replicated = NamedSharding(step.mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jitted = jax.jit(step.update, donate_argnums=0, out_shardings=(shardings, replicated))
    return jitted.lower(abstract, batch)
