"""Attention over packed sequences: one function, several backends, chosen by the request and the device.

B batch, L sequence length (queries), M sequence length (keys), H heads, K kv heads, E head width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import AttentionConfig, ConfigError, RunConfig
from jaxtrain.mesh.constraints import active_axes, active_mesh
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import context
from jaxtrain.ops.blocks import MASKED, TokenPositions, Window, visible
from jaxtrain.ops.kernels import CUDNN, MOSAIC, TILES, Kernel, ScoreOptions
from jaxtrain.ops.reference import uses_reference

DENSE_LENGTH = 1024
"""Longest sequence for which one dense softmax is fastest on a CPU."""

HALF_DTYPES = ("float16", "bfloat16")


class AttentionRequest(NamedTuple):
    """The properties of a layer and its device that decide which backends can serve it."""

    platform: str
    """cpu, gpu or tpu."""
    capability: float | None
    """CUDA compute capability of the devices; None elsewhere."""
    length: int
    widths: tuple[int, int]
    """Widths of a head's queries and values."""
    dtype: str
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    packed: bool = True
    """A sequence may hold several documents."""
    context_method: str | None = None
    """attention.context_parallel where sequences are sharded over devices."""
    described: bool = False
    """The devices are described, not present: the packages they need are assumed to be installed there."""


@dataclass(frozen=True)
class Backend:
    """An implementation of attention.

    `cannot` and `should_not` return why it cannot serve a request and why `auto` should not choose it, or None. Without
    a kernel it is the dense softmax.
    """

    name: str
    cannot: Callable[[AttentionRequest], str | None]
    should_not: Callable[[AttentionRequest], str | None] = lambda request: None
    kernel: Kernel | None = None


class BackendChoice(NamedTuple):
    """A backend and the reason for the choice."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.reason})"


def _dense_cannot(request: AttentionRequest) -> str | None:
    return "sequences are sharded over mesh.seq" if request.context_method else None


def _dense_should_not(request: AttentionRequest) -> str | None:
    if request.platform != "cpu":
        return "it stores all scores"
    if request.length > DENSE_LENGTH:
        return f"it stores all scores, of sequences longer than {DENSE_LENGTH}"
    return None


def _tokamax_cannot(request: AttentionRequest) -> str | None:
    capability = request.capability
    if request.platform != "gpu" or capability is None or not 9.0 <= capability < 11.0:
        return "it needs NVIDIA GPUs of compute capability 9 or 10 (Hopper, Blackwell)"
    if request.dtype not in HALF_DTYPES:
        return f"it computes in {' and '.join(HALF_DTYPES)}, not in {request.dtype}"
    if max(request.widths) > 256:
        return f"the head width {max(request.widths)} is above 256"
    if not request.described and find_spec("tokamax") is None:
        return "the package tokamax is not installed: pip install -r requirements-gpu.txt"
    return None


def _cudnn_cannot(request: AttentionRequest) -> str | None:
    capability = request.capability
    if request.platform != "gpu" or capability is None or capability < 8.0:
        return "it needs NVIDIA GPUs of compute capability 8 or later"
    if request.dtype not in HALF_DTYPES:
        return f"it computes in {' and '.join(HALF_DTYPES)}, not in {request.dtype}"
    if request.packed:
        return "it cannot separate the documents of a packed sequence (data.packing is not none)"
    if request.window or request.softcap:
        return "it supports neither windows nor a soft cap"
    if request.context_method == "all_gather":
        return "it cannot attend to a range of the keys (attention.context_parallel all_gather)"
    widest = 256 if capability >= 9.0 else 128
    if any(width % 8 or width > widest for width in request.widths):
        return f"the head widths {request.widths} are not multiples of 8 up to {widest}"
    if request.widths[0] != request.widths[1] and capability < 9.0:
        return "head widths of queries and values that differ need compute capability 9 or later"
    return None


BACKENDS = (
    Backend("dense", _dense_cannot, _dense_should_not),
    Backend("tokamax", _tokamax_cannot, kernel=MOSAIC),
    Backend("cudnn", _cudnn_cannot, kernel=CUDNN),
    Backend("xla", lambda request: None, kernel=TILES),
)
"""In the order in which `auto` considers them."""


def choose(wanted: str, request: AttentionRequest) -> BackendChoice:
    """The backend that serves a request under attention.backend `wanted`.

    Raises ConfigError where the wanted backend cannot serve it, naming those that can.
    """
    if uses_reference():
        return BackendChoice(BACKENDS[0], "reference")
    refusals = {backend.name: backend.cannot(request) for backend in BACKENDS}
    if wanted == "auto":
        against = {b.name: refusals[b.name] or b.should_not(request) for b in BACKENDS}
        chosen = next(backend for backend in BACKENDS if against[backend.name] is None)
        skipped = BACKENDS[: BACKENDS.index(chosen)]
        return BackendChoice(
            chosen, "; ".join(f"not {b.name}: {against[b.name]}" for b in skipped) or "the fastest here"
        )
    if refusals[wanted] is not None:
        able = ", ".join(name for name, refusal in refusals.items() if refusal is None)
        raise ConfigError(f"attention.backend {wanted} cannot be used: {refusals[wanted]}; backends that can: {able}")
    return BackendChoice(next(b for b in BACKENDS if b.name == wanted), "attention.backend")


def choose_for(config: RunConfig, device: Any, length: int, sharded: bool, described: bool = False) -> BackendChoice:
    """The backend of a run's layers for sequences of `length` on devices like `device`; `sharded`: over mesh.seq.

    Raises ConfigError like `choose`.
    """
    model, mla = config.model, config.model.mla
    width = model.width_of_head
    widths = (width + mla.rope_dim, mla.v_dim or width) if mla.kv_rank else (width, width)
    request = AttentionRequest(
        *_kind(device), length, widths, config.precision.compute, any(model.windows),
        model.attention_softcap is not None, model.attention_sinks, _packed(config),
        config.attention.context_parallel if sharded else None, described,
    )  # fmt: skip
    return choose(config.attention.backend, request)


class _AttentionSetting(NamedTuple):
    config: AttentionConfig
    packed: bool


# Outside a run (sampling, notebooks) sequences may be packed.
_DEFAULT = _AttentionSetting(AttentionConfig(), packed=True)
_SETTING: ContextVar[_AttentionSetting | None] = ContextVar("jaxtrain_attention", default=None)


@contextmanager
def use_attention(config: RunConfig) -> Iterator[None]:
    """While tracing here, `attend` follows config.attention, for sequences packed by config.data."""
    token = _SETTING.set(_AttentionSetting(config.attention, _packed(config)))
    try:
        yield
    finally:
        _SETTING.reset(token)


def attend(
    q_BLHE: jax.Array, k_BLKE: jax.Array, v_BLKV: jax.Array, segments_BL: jax.Array, positions_BL: jax.Array,
    window: Window = None, softcap: float | None = None, scale: float | None = None, sinks_H: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Causal attention within each document of a sequence, softmax in float32; [B, L, H, V] in q's dtype.

    A query sees the keys of its segment with 0 <= position(query) - position(key) < window. Segment 0 is padding: its
    queries see no key and their output is 0. Scores are multiplied by `scale` (None: 1 / sqrt(E)), then bounded by
    `softcap` (Gemma 2). A head's sink is added to the softmax's denominator (gpt-oss). Raises ConfigError where
    attention.backend cannot serve these arguments.
    """
    setting, mesh = _SETTING.get() or _DEFAULT, active_mesh()
    length = active_axes("seq_len")
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    context_method = setting.config.context_parallel if length else None
    E, V = q_BLHE.shape[3], v_BLKV.shape[3]
    request = AttentionRequest(
        *_kind(device), q_BLHE.shape[1], (E, V), q_BLHE.dtype.name, window is not None, softcap is not None,
        sinks_H is not None, setting.packed, context_method,
    )  # fmt: skip
    kernel = choose(setting.config.backend, request).backend.kernel
    options = ScoreOptions(window, softcap, E**-0.5 if scale is None else scale)
    tokens = TokenPositions(segments_BL, positions_BL)
    if kernel is None:
        out_BLHV = tag(dense(q_BLHE, k_BLKE, v_BLKV, tokens, options, sinks_H), "attention_out")
    else:
        method = setting.config.context_parallel
        out_BLHV = context.attend_sharded(q_BLHE, k_BLKE, v_BLKV, tokens, options, sinks_H, method, kernel)
    return jnp.where(segments_BL[:, :, None, None] > 0, out_BLHV, 0)


def dense(
    q_BLHE: jax.Array,
    k_BLKE: jax.Array,
    v_BLKV: jax.Array,
    tokens: TokenPositions,
    options: ScoreOptions,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """One softmax over all scores, differentiated by JAX; the output of padding is undefined."""
    H = q_BLHE.shape[2]
    # Heads before length, so that the matmuls are batched. Repeated keys are small beside the scores, fast on the CPU,
    # and keep the heads one dim, which any mesh axis that divides it can shard.
    # Repeated in float32, in which their gradients are then summed over the heads of a group.
    k_BMHE, v_BMHV = (
        jnp.repeat(a.astype(jnp.float32), H // a.shape[2], axis=2).astype(a.dtype) for a in (k_BLKE, v_BLKV)
    )
    q_BHLE, k_BHME, v_BHMV = (a.swapaxes(1, 2) for a in (q_BLHE, k_BMHE, v_BMHV))
    scores_BHLM = jnp.einsum("bhle,bhme->bhlm", q_BHLE, k_BHME, preferred_element_type=jnp.float32) * options.scale
    if options.softcap is not None:
        scores_BHLM = options.softcap * jnp.tanh(scores_BHLM / options.softcap)
    # An added mask is one array for all heads, and an addition has a cheaper gradient than a select.
    mask_BLM = jnp.where(visible(tokens, tokens, options.window), 0.0, MASKED)
    scores_BHLM += mask_BLM[:, None]
    if sinks_H is None:
        weights_BHLM = jax.nn.softmax(scores_BHLM, axis=-1)
    else:
        sinks_BHL1 = jnp.broadcast_to(sinks_H.astype(jnp.float32)[:, None, None], (*scores_BHLM.shape[:3], 1))
        weights_BHLM = jax.nn.softmax(jnp.concatenate([scores_BHLM, sinks_BHL1], axis=-1), axis=-1)[..., :-1]
    weights_BHLM = weights_BHLM.astype(v_BLKV.dtype)
    out_BHLV = jnp.einsum("bhlm,bhmv->bhlv", weights_BHLM, v_BHMV, preferred_element_type=jnp.float32)
    return out_BHLV.swapaxes(1, 2).astype(q_BLHE.dtype)


def _kind(device: Any) -> tuple[str, float | None]:
    capability = getattr(device, "compute_capability", None)
    return device.platform, None if capability is None else float(capability)


def _packed(config: RunConfig) -> bool:
    return config.data.packing != "none"
