"""Executed matmul FLOPs against hand counts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from texts import llama, module

from jaxtrain.program.flops import ProgramFlops, computation_flops, count_flops
from jaxtrain.program.hlo import read_program


def flops_of(f: object, *arguments: object) -> ProgramFlops:
    return count_flops(read_program(jax.jit(f).lower(*arguments).compile().as_text()))  # type: ignore[arg-type]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=5, max_size=5), st.integers(1, 4))
def test_batched_products_in_a_loop(sizes: list[int], trips: int) -> None:
    b, m, k, n, j = sizes

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        body = lambda c, _: (c + jnp.einsum("bmkj,bkjn->bmn", x, y * c.sum()), None)  # noqa: E731
        return jax.lax.scan(body, jnp.zeros((b, m, n)), None, length=trips)[0]

    assert flops_of(f, jnp.ones((b, m, k, j)), jnp.ones((b, k, j, n))).total == trips * 2 * b * m * n * k * j


def test_each_device_counts_its_share() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    w = jax.ShapeDtypeStruct((32, 48), jnp.float32, sharding=NamedSharding(mesh, P(None, "b")))
    assert flops_of(lambda x, w: x @ w, x, w).total == 2 * 64 * 32 * 48 // 8


@pytest.mark.parametrize(("order", "shape"), [("HWIO", (3, 5, 3, 8)), ("OIHW", (8, 3, 3, 5))])
def test_a_convolution(order: str, shape: tuple[int, ...]) -> None:
    def f(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", order, "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=2
        )

    assert flops_of(f, jnp.ones((2, 16, 16, 6)), jnp.ones(shape)).total == 2 * (2 * 14 * 12 * 8) * (3 * 5 * 3)


def test_a_conditional_counts_its_most_expensive_branch() -> None:
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.switch(n, [lambda x: x @ x, jnp.tanh, lambda x: x @ x @ x @ x], x)

    program = read_program(jax.jit(f).lower(jnp.ones((16, 16)), 1).compile().as_text())
    assert count_flops(program).total == computation_flops(program, program.entry) == 3 * 2 * 16**3


def gpu_call(shape: str, target: str, backend: str, operands: str = "%q, %k") -> str:
    return module(f"""
        %q = bf16[4,1024,8,128] parameter(0)
        %k = bf16[4,1024,2,128] parameter(1)
        %left = bf16[3,64,32] parameter(2)
        %right = bf16[3,32,48] parameter(3)
        ROOT %c = {shape} custom-call({operands}), custom_call_target="{target}", backend_config={backend}
    """)


def count(text: str) -> ProgramFlops:
    program = read_program(text)
    assert program.unknown == ()
    return count_flops(program)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_library_gemms(target: str) -> None:
    backend = (
        '{"operation_queue_id":"0","gemm_backend_config":{"beta":0,"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
        '"rhs_batch_dimensions":["0"]}}}'
    )
    text = gpu_call("(bf16[3,64,48]{2,1,0}, s8[4194304]{0})", target, backend, "%left, %right")
    assert count(text) == ProgramFlops(2 * 3 * 64 * 48 * 32, {"": 2 * 3 * 64 * 48 * 32}, ())


def test_a_library_matmul_without_dimension_numbers() -> None:
    text = gpu_call("f32[3,64,48]{2,1,0}", "__onednn$matmul", "{}", "%left, %right")
    assert count(text).total == 2 * 3 * 64 * 48 * 32


@pytest.mark.parametrize(("target", "products"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_library_attention_counts_full_scores(target: str, products: int) -> None:
    backend = (
        '{"cudnn_fmha_backend_config": {"fmha_scale": 0.1, "intermediate_tensor_shape": {"element_type": "BF16", '
        '"dimensions": ["4", "8", "1024", "1024"]}, "mask_type": "CAUSAL"}}'
    )
    text = gpu_call("(bf16[4,8,1024,128]{3,1,2,0}, u8[0]{0})", target, backend)
    assert count(text).total == products * 2 * 4 * 8 * 1024 * 1024 * 128


def test_a_kernel_of_unknown_work_is_reported_and_not_guessed() -> None:
    text = gpu_call("bf16[4,1024,8,128]", "mosaic_gpu_v2", '"opaque"')
    assert count(text) == ProgramFlops(0, {}, (("mosaic_gpu_v2", 1),))
    assert count(gpu_call("bf16[4,1024,8,128]", "__cudnn$fmhaSoftmax", "{}")).opaque == (("__cudnn$fmhaSoftmax", 1),)
    assert count(gpu_call("(s32[8], u8[1])", "__cub$DeviceRadixSort", "{}")).opaque == ()


@pytest.mark.parametrize(
    ("shape", "attributes", "flops"),
    [
        # 64 tokens in 4 groups, each group with another [32, 48]
        ("f32[64,48]", "lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}", 2 * 64 * 32 * 48),
        # the weight gradient: 4 groups share the 64 tokens
        ("f32[4,32,40]", "lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}", 2 * 64 * 32 * 40),
    ],
)
def test_ragged_products_count_their_tokens_once(shape: str, attributes: str, flops: int) -> None:
    text = module(f"""
        %x = f32[64,32] parameter(0)
        %w = f32[4,32,48] parameter(1)
        %y = f32[64,40] parameter(2)
        %sizes = s32[4] parameter(3)
        ROOT %d = {shape} ragged-dot(%x, {"%w" if "48" in shape else "%y"}, %sizes), {attributes}
    """)
    assert count(text).total == flops


def test_llama_8b_executes_what_a_hand_counts() -> None:
    """Full remat: every product of a layer once more, except the last one, whose result the backward does not need."""
    layers, d, ff, heads, kv, width, vocabulary = 32, 4096, 14336, 32, 8, 128, 128256
    sequences, length = 64, 4096
    projections = d * heads * width + 2 * d * kv * width + heads * width * d + 3 * d * ff
    scores = 2 * heads * width * length
    a_layer = 2 * (projections + scores)
    a_token = layers * (4 * a_layer - 2 * d * ff) + 3 * 2 * d * vocabulary
    by_hand = sequences * length * a_token
    counted = count_flops(llama())
    assert counted.opaque == ()
    assert math.isclose(64 * counted.total, by_hand, rel_tol=1e-2)
    assert 64 * counted.total == by_hand
    assert counted.by_source["jaxtrain/ops/attention.py:33"] * 64 == layers * sequences * length * 4 * scores
