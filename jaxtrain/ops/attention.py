"""Attention over packed rows: one function, several backends, chosen by what a layer asks and what the device is.

B batch, L length (queries), M length (keys), H heads, K kv heads, E head width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrain.config import AttentionConfig, Axis, ConfigError, RunConfig
from jaxtrain.mesh.constraints import active_axes, active_mesh, dividing_axes
from jaxtrain.mesh.param import make_spec
from jaxtrain.mesh.shard_map import shard_mapped
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import blocks, context
from jaxtrain.ops.blocks import HIDDEN, TokenPositions, Window, visible
from jaxtrain.ops.kernels import CUDNN, MOSAIC, TILES, Kept, Kernel, Score, Sight, first_keys
from jaxtrain.ops.reference import uses_reference
from jaxtrain.ops.residuals import custom_vjp_with_residuals

DENSE_LENGTH = 1024
"""Rows up to this length are fastest with all scores at once on a CPU."""

HALF_DTYPES = ("float16", "bfloat16")


class Request(NamedTuple):
    """What a layer asks for, as far as backends differ."""

    platform: str
    """cpu, gpu or tpu."""
    capability: float | None
    """CUDA compute capability of the devices; None elsewhere."""
    length: int
    widths: tuple[int, int]
    """Of a head's queries and values."""
    dtype: str
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    packed: bool = True
    """A row may hold several documents."""
    context_method: str | None = None
    """attention.context_parallel where rows are split over devices."""
    described: bool = False
    """The devices are not here: packages are taken to be installed where they are."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention: why it cannot serve a request, why `auto` passes it over, its kernel (or dense)."""

    name: str
    cannot: Callable[[Request], str | None]
    should_not: Callable[[Request], str | None] = lambda request: None
    kernel: Kernel | None = None


class Choice(NamedTuple):
    """A backend and why it was taken."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.reason})"


def _dense_cannot(request: Request) -> str | None:
    return "rows are split over mesh.seq" if request.context_method else None


def _dense_should_not(request: Request) -> str | None:
    if request.platform != "cpu":
        return "it holds all scores"
    if request.length > DENSE_LENGTH:
        return f"it holds all scores, of rows longer than {DENSE_LENGTH}"
    return None


def _tokamax_cannot(request: Request) -> str | None:
    capability = request.capability
    if request.platform != "gpu" or capability is None or not 9.0 <= capability < 11.0:
        return "it needs NVIDIA GPUs of compute capability 9 or 10 (Hopper, Blackwell)"
    if request.dtype not in HALF_DTYPES:
        return f"it computes in {' and '.join(HALF_DTYPES)}, not in {request.dtype}"
    if max(request.widths) > 256:
        return f"heads of {max(request.widths)} are wider than 256"
    if not request.described and find_spec("tokamax") is None:
        return "the package tokamax is not installed: pip install -r requirements-gpu.txt"
    return None


def _cudnn_cannot(request: Request) -> str | None:
    capability = request.capability
    if request.platform != "gpu" or capability is None or capability < 8.0:
        return "it needs NVIDIA GPUs of compute capability 8 or later"
    if request.dtype not in HALF_DTYPES:
        return f"it computes in {' and '.join(HALF_DTYPES)}, not in {request.dtype}"
    if request.packed:
        return "it cannot keep the documents of a packed row apart (data.packing is not none)"
    if request.window or request.softcap:
        return "it has neither windows nor a soft cap here"
    if request.context_method == "all_gather":
        return "it cannot see a part of the keys: attention.context_parallel all_gather"
    widest = 256 if capability >= 9.0 else 128
    if any(width % 8 or width > widest for width in request.widths):
        return f"heads of {request.widths} are no multiples of 8 up to {widest}"
    if request.widths[0] != request.widths[1] and capability < 9.0:
        return "values narrower than keys need compute capability 9 or later"
    return None


BACKENDS = (
    Backend("dense", _dense_cannot, _dense_should_not),
    Backend("tokamax", _tokamax_cannot, kernel=MOSAIC),
    Backend("cudnn", _cudnn_cannot, kernel=CUDNN),
    Backend("xla", lambda request: None, kernel=TILES),
)
"""In the order in which `auto` tries them."""


def choose(wanted: str, request: Request) -> Choice:
    """The backend that attention.backend `wanted` means for a request.

    Raises ConfigError, naming the backends that can, where the one wanted cannot.
    """
    if uses_reference():
        return Choice(BACKENDS[0], "plain mathematics")
    refusals = {backend.name: backend.cannot(request) for backend in BACKENDS}
    if wanted == "auto":
        passed = {b.name: refusals[b.name] or b.should_not(request) for b in BACKENDS}
        taken = next(backend for backend in BACKENDS if passed[backend.name] is None)
        before = BACKENDS[: BACKENDS.index(taken)]
        return Choice(taken, "; ".join(f"not {b.name}: {passed[b.name]}" for b in before) or "the fastest here")
    if refusals[wanted] is not None:
        able = ", ".join(name for name, refusal in refusals.items() if refusal is None)
        raise ConfigError(f"attention.backend {wanted} cannot do this: {refusals[wanted]}; backends that can: {able}")
    return Choice(next(b for b in BACKENDS if b.name == wanted), "attention.backend")


def choose_for(config: RunConfig, device: Any, length: int, split: bool, described: bool = False) -> Choice:
    """The backend of a run's layers on rows of `length`, `split` over devices like `device` or whole on each.

    Raises ConfigError like `choose`.
    """
    model, mla = config.model, config.model.mla
    width = model.width_of_head
    widths = (width + mla.rope_dim, mla.v_dim or width) if mla.kv_rank else (width, width)
    request = Request(
        *_kind(device), length, widths, config.precision.compute, any(model.windows),
        model.attention_softcap is not None, model.attention_sinks, _packed(config),
        config.attention.context_parallel if split else None, described,
    )  # fmt: skip
    return choose(config.attention.backend, request)


class _Setting(NamedTuple):
    config: AttentionConfig
    packed: bool


# Outside of a run (sampling, notebooks) rows may hold anything.
_DEFAULT = _Setting(AttentionConfig(), packed=True)
_SETTING: ContextVar[_Setting | None] = ContextVar("jaxtrain_attention", default=None)


@contextmanager
def use_attention(config: RunConfig) -> Iterator[None]:
    """While tracing here, `attend` obeys config.attention, on rows as config.data lays them."""
    token = _SETTING.set(_Setting(config.attention, _packed(config)))
    try:
        yield
    finally:
        _SETTING.reset(token)


def attend(
    q_BLHE: jax.Array, k_BLKE: jax.Array, v_BLKV: jax.Array, segments_BL: jax.Array, positions_BL: jax.Array,
    window: Window = None, softcap: float | None = None, scale: float | None = None, sinks_H: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Causal attention inside each document of a row, softmax in float32; [B, L, H, V] in q's dtype.

    A query sees the keys of its segment with 0 <= position(query) - position(key) < window; segment 0 is padding, which
    sees nothing and gives zeros. Scores are scaled by `scale` (None: 1 / sqrt(E)), then bounded by `softcap` (Gemma 2);
    a head's sink takes part in the softmax and adds nothing (gpt-oss). Raises ConfigError where attention.backend names
    a backend that cannot do this.
    """
    setting, mesh = _SETTING.get() or _DEFAULT, active_mesh()
    length = active_axes("seq_len")
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    context_method = setting.config.context_parallel if length else None
    E, V = q_BLHE.shape[3], v_BLKV.shape[3]
    request = Request(
        *_kind(device), q_BLHE.shape[1], (E, V), q_BLHE.dtype.name, window is not None, softcap is not None,
        sinks_H is not None, setting.packed, context_method,
    )  # fmt: skip
    kernel = choose(setting.config.backend, request).backend.kernel
    score = Score(window, softcap, E**-0.5 if scale is None else scale)
    places = TokenPositions(segments_BL, positions_BL)
    if kernel is None:
        out_BLHV = tag(dense(q_BLHE, k_BLKE, v_BLKV, places, score, sinks_H), "attention_out")
    elif context_method is not None:
        out_BLHV = context.attend(q_BLHE, k_BLKE, v_BLKV, *places, score, sinks_H, context_method, kernel)
    else:
        out_BLHV = _by_device(kernel, q_BLHE, k_BLKE, v_BLKV, places, score, sinks_H)
    return jnp.where(segments_BL[:, :, None, None] > 0, out_BLHV, 0)


def dense(
    q_BLHE: jax.Array,
    k_BLKE: jax.Array,
    v_BLKV: jax.Array,
    places: TokenPositions,
    score: Score,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """One softmax over all scores, differentiated by JAX; padding has no promise."""
    H = q_BLHE.shape[2]
    # Heads before length: batched matmuls of plain matrices. Repeated keys cost little beside the scores, keep the
    # heads one dim, so that any mesh axis that divides them can shard them, and are what the CPU is fastest with.
    k_BMHE, v_BMHV = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (k_BLKE, v_BLKV))
    q_BHLE, k_BHME, v_BHMV = (a.swapaxes(1, 2) for a in (q_BLHE, k_BMHE, v_BMHV))
    scores_BHLM = jnp.einsum("bhle,bhme->bhlm", q_BHLE, k_BHME, preferred_element_type=jnp.float32) * score.scale
    if score.softcap is not None:
        scores_BHLM = score.softcap * jnp.tanh(scores_BHLM / score.softcap)
    # Added, not selected: one array for all heads, and a sum has a cheaper gradient than a select.
    hidden_BLM = jnp.where(visible(places, places, score.window), 0.0, HIDDEN)
    scores_BHLM += hidden_BLM[:, None]
    if sinks_H is None:
        weights_BHLM = jax.nn.softmax(scores_BHLM, axis=-1)
    else:
        sinks_BHL1 = jnp.broadcast_to(sinks_H.astype(jnp.float32)[:, None, None], (*scores_BHLM.shape[:3], 1))
        weights_BHLM = jax.nn.softmax(jnp.concatenate([scores_BHLM, sinks_BHL1], axis=-1), axis=-1)[..., :-1]
    weights_BHLM = weights_BHLM.astype(v_BLKV.dtype)
    out_BHLV = jnp.einsum("bhlm,bhmv->bhlv", weights_BHLM, v_BHMV, preferred_element_type=jnp.float32)
    return out_BHLV.swapaxes(1, 2).astype(q_BLHE.dtype)


def _by_device(
    kernel: Kernel, q_BLHE: jax.Array, k_BLKE: jax.Array, v_BLKV: jax.Array, places: TokenPositions, score: Score,
    sinks_H: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """A kernel on each device's rows and heads: no partitioner looks into it."""
    # A window that is a number stays one, so that a kernel can skip what lies behind it.
    traced = score.window if isinstance(score.window, jax.Array) else None
    static = score if traced is None else score._replace(window=None)
    B, _, H, _ = q_BLHE.shape
    mesh, batch, heads = active_mesh(), dividing_axes("batch", B), dividing_axes("heads", H)
    forward: Callable[..., Any] = partial(_forward, kernel, static)
    backward: Callable[..., Any] = partial(_backward, kernel, static, batch)
    if mesh is not None:
        shards = math.prod(mesh.shape[axis] for axis in heads)
        K = k_BLKE.shape[2]
        # Fewer kv heads than shards: each device takes the one that its query heads share.
        k_BLKE, v_BLKV = (jnp.repeat(x, math.lcm(K, shards) // K, axis=2) for x in (k_BLKE, v_BLKV))
        rows, by_head, of_heads = make_spec([batch]), make_spec([batch, (), heads]), make_spec([heads])
        inputs = by_head, by_head, by_head, of_heads, rows, PartitionSpec()
        outputs = by_head, make_spec([batch, heads])
        forward = shard_mapped(forward, inputs, outputs)
        backward = shard_mapped(
            backward, (inputs, *outputs, by_head), (by_head, by_head, by_head, of_heads, None, None)
        )
    # Who keeps the output (remat.names) need not attend again.
    attention = custom_vjp_with_residuals(forward, backward, "attention_out")
    return attention(q_BLHE, k_BLKE, v_BLKV, sinks_H, places, traced)


def _forward(
    kernel: Kernel, static: Score, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None,
    places: TokenPositions, window: Window,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    score = static if window is None else static._replace(window=window)
    out, lse = kernel.forward(q, k, v, _sight(places, score), score)
    if sinks is not None:
        out, lse = blocks.add_sinks(out.astype(jnp.float32), lse, sinks)
    return out.astype(q.dtype), lse


def _backward(
    kernel: Kernel, static: Score, batch: tuple[Axis, ...], inputs: Any, out: jax.Array, lse: jax.Array, dout: jax.Array
) -> tuple[Any, ...]:
    q, k, v, sinks, places, window = inputs
    kept = Kept(out, lse, dout, blocks.row_delta(out, dout))
    score = static if window is None else static._replace(window=window)
    gradients = kernel.backward(q, k, v, kept, _sight(places, score), score)
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))
    dsinks = None
    if sinks is not None:
        dsinks = blocks.sinks_gradient(lse, kept.delta_BHP, sinks).astype(sinks.dtype)
        dsinks = lax.psum(dsinks, batch) if batch else dsinks
    return dq, dk, dv, dsinks, None, None


def _sight(places: TokenPositions, score: Score) -> Sight:
    return Sight(places, places, first_keys(places, score.window), ordered=True)


def _kind(device: Any) -> tuple[str, float | None]:
    capability = getattr(device, "compute_capability", None)
    return device.platform, None if capability is None else float(capability)


def _packed(config: RunConfig) -> bool:
    return config.data.packing != "none"
