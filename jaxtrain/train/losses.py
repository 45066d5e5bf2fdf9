"""Losses and metrics of a microbatch, as registries that user code can extend.

A loss maps `HeadInputs` to (sum over scored tokens, sums); a metric maps them to one sum over scored tokens. Both are
traced inside the train step, once a microbatch, on global arrays: they must be sums over tokens, so that accumulation
and any mesh give the same result.

    from jaxtrain import METRICS

    @METRICS.register("label_mean")
    def label_mean(inputs):
        return jnp.sum(jnp.where(inputs.scored, inputs.batch["labels"], 0).astype(jnp.float32))

With `train.metrics: [label_mean]` each row of metrics.jsonl holds its mean over scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxtrain.config import Registry, RunConfig
from jaxtrain.ops.loss import IGNORE, loss_sums
from jaxtrain.pipeline.chunk import Sums


@dataclass(frozen=True)
class HeadInputs:
    """What a loss or metric reads of one microbatch.

    x_BLD: residual stream after the final norm; head_DV: output projection; batch: integer fields [B, L] "tokens",
    "labels" (IGNORE: not scored), "segments", "positions"; batch_shards: devices that share the batch dimension.
    """

    config: RunConfig
    x_BLD: jax.Array
    head_DV: jax.Array
    batch: dict[str, jax.Array]
    batch_shards: int

    @property
    def scored(self) -> jax.Array:
        """Which tokens have a label, bool [B, L]."""
        return self.batch["labels"] != IGNORE


Loss = Callable[[HeadInputs], tuple[jax.Array, Sums]]
Metric = Callable[[HeadInputs], jax.Array]

LOSSES: Registry[Loss] = Registry("train.loss")
"""Setting train.loss -> (sum to differentiate, sums that are reported); the sums hold "loss" and "scored"."""
METRICS: Registry[Metric] = Registry("train.metrics")
"""Entry of train.metrics -> float32 sum over scored tokens."""


@LOSSES.register("cross_entropy")
def cross_entropy_loss(inputs: HeadInputs) -> tuple[jax.Array, Sums]:
    """Cross entropy in nats plus train.z_loss times the squared log-partition (PaLM), in chunks over the vocabulary."""
    model, z_weight = inputs.config.model, inputs.config.train.z_loss
    return loss_sums(
        inputs.x_BLD, inputs.head_DV, inputs.batch["labels"], model.logit_softcap, inputs.batch_shards, z_weight,
        model.unpadded_vocab_size,
    )  # fmt: skip


def metric_sums(inputs: HeadInputs) -> Sums:
    """The sum of each metric of train.metrics; no gradient flows through them."""
    still = HeadInputs(
        inputs.config, *jax.lax.stop_gradient((inputs.x_BLD, inputs.head_DV)), inputs.batch, inputs.batch_shards
    )
    return {f"metric/{name}": METRICS[name](still) for name in inputs.config.train.metrics}


def check_losses(config: RunConfig) -> None:
    """Raise ConfigError where train.loss or train.metrics name something that is not registered."""
    for registry, names in ((LOSSES, [config.train.loss]), (METRICS, config.train.metrics)):
        for name in names:
            registry[name]
