"""Sampling from a model in a buffer of fixed size: compiled once; the prefix is recomputed for every token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.config import ConfigError
from jaxtrain.nn.model import Model, Tree
from jaxtrain.ops.loss import mask_padding, soft_cap


def sample(
    model: Model,
    params: Tree,
    prompt_ids: Sequence[int],
    n: int,
    temperature: float,
    key: jax.Array,
    stop: Sequence[int] = (),
) -> NDArray[np.int32]:
    """The prompt followed by n tokens drawn at `temperature` (0 is greedy): int32 [len(prompt_ids) + n].

    A token of `stop` is the last one: then the result is shorter.

    Raises ConfigError for an empty prompt, or where the text would be longer than the table of learned positions.
    Call it outside `use_rules`: a batch of one sequence cannot be sharded over replicas.
    """
    length, longest = len(prompt_ids) + n, model.config.max_seq_len
    if not len(prompt_ids):
        raise ConfigError("train.sample_prompt has no token: give at least one character, or an empty prompt for none")
    if model.config.positions == "learned" and length > longest:
        raise ConfigError(
            f"train.sample_tokens {n} after a prompt of {len(prompt_ids)} tokens exceeds model.max_seq_len {longest}, "
            "the number of learned positions: sample fewer tokens"
        )
    buffer = np.zeros(length, np.int32)
    buffer[: len(prompt_ids)] = prompt_ids
    stop = tuple(sorted(set(stop)))
    filled, end = _fill(model, stop, params, buffer, len(prompt_ids), jnp.float32(temperature), key)
    return np.asarray(filled)[: int(end)]


@partial(jax.jit, static_argnums=(0, 1))
def _fill(
    model: Model,
    stop: tuple[int, ...],
    params: Tree,
    buffer_L: jax.Array,
    start: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write tokens from index `start` on; the unwritten rest of the buffer is masked by causality.

    Returns the buffer and the number of tokens in it: fewer than it has room for where one of `stop` was written.
    """
    positions_BL = jnp.arange(buffer_L.shape[0])[None]
    segments_BL = jnp.ones_like(positions_BL)
    head_DV = model.head(params)

    def write(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, buffer_L = state
        x_BLD, _ = model.hidden(params, buffer_L[None], positions_BL, segments_BL)
        logits_V = jnp.dot(x_BLD[0, index - 1], head_DV, preferred_element_type=jnp.float32)
        logits_V = mask_padding(soft_cap(logits_V, model.config.logit_softcap), model.config.unpadded_vocab_size)
        sampled = jax.random.categorical(jax.random.fold_in(key, index), logits_V / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, sampled, jnp.argmax(logits_V))
        return index + 1, buffer_L.at[index].set(token.astype(buffer_L.dtype))

    def goes_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        index, buffer_L = state
        ended = jnp.any(buffer_L[index - 1] == jnp.array(stop, buffer_L.dtype)) & (index > start)
        return (index < buffer_L.shape[0]) & ~ended

    end, buffer_L = jax.lax.while_loop(goes_on, write, (jnp.asarray(start), jnp.asarray(buffer_L)))
    return buffer_L, end
