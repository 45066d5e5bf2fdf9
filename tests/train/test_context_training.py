"""Rows that devices share: the loader's order, and loss and every gradient as on one device under any other layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from runs import LENGTH, ROWS, VOCAB, config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.config import ConfigError
from jaxtrain.data import IGNORE
from jaxtrain.ops.context import CONTEXT_METHODS
from jaxtrain.ops.zigzag import zigzag_order
from jaxtrain.train.batch import owned_rows, shard_batch
from jaxtrain.train.step import jit_evaluate

MODEL = {"n_layers": 2, "windows": [None, 5]}


def rows_over_borders(length: int = LENGTH) -> dict[str, np.ndarray]:
    """Packed rows, the first four of which are hard to split over devices.

    One document over every border; one token, then a document up to the end; three tokens, so that most shards are
    padding; a document of which the early half alone is scored, so that some shards score nothing.
    """
    rng = np.random.default_rng(7)
    rows = packed_rows(3, length=length)
    for row, sizes in enumerate([[length], [1, length - 1], [3], [length]]):
        at = 0
        for number, size in enumerate(sizes):
            here = slice(at, at + size)
            rows["tokens"][row, here] = rng.integers(0, VOCAB, size)
            rows["segments"][row, here] = number + 1
            rows["positions"][row, here] = np.arange(size)
            rows["labels"][row, here] = rng.integers(0, VOCAB, size)
            at += size
    rows["labels"][3, length // 4 :] = IGNORE
    return rows


def gradients_of(length: int = LENGTH, devices: int | None = None, **sections: Any) -> Any:
    """Gradients, loss sum and number of scored tokens."""
    setup = setup_of(config_of(**{"model": MODEL, "data": {"seq_len": length}, **sections}), devices)
    batch = shard_batch(rows_over_borders(length), 0, setup.batch_shape, setup.batch_sharding)
    params = setup.init_state()["params"]
    gradients, sums = jax.device_get(jax.jit(lambda p, b: setup.step.gradients(p, b, 3.0))(params, batch))
    return gradients, float(sums["loss"]), int(sums["scored"])


@cache
def alone(length: int = LENGTH, windows: bool = True) -> Any:
    return gradients_of(length, 1, **({} if windows else {"model": {**MODEL, "windows": [None]}}))


def compare(got: Any, want: Any) -> None:
    """The same scored tokens, loss within 2e-6, every leaf's gradient within 2e-5 of its largest."""
    assert got[2] == want[2] and got[1] == pytest.approx(want[1], rel=2e-6)
    error, path = worst_relative_error(got[0], want[0])
    assert error < 2e-5, path


FULL = {"model": {**MODEL, "windows": [None]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"mesh": {"data": 1}},
    "without windows": FULL,
    "data": {},
    "zero2, 2 microbatches": {"rules": {"preset": ["zero2"]}, "train": {"accumulation": 2}},
    "fsdp, remat full": {"rules": {"preset": ["fsdp"]}, "remat": {"policy": "full"}},
    "fsdp over data and seq": {"rules": {"preset": ["fsdp"], "embed": ["data", "seq"], "norm": ["data", "seq"]}},
    "tensor": {"mesh": {"tensor": 2}, "rules": {"preset": ["tensor"]}},
    "sequence parallelism, zero1, remat of names": {
        "mesh": {"tensor": 2}, "rules": {"preset": ["zero1", "tensor_sequence"]},
        "remat": {"policy": "names", "names": ["qkv", "attention_out"]},
    },
    "fsdp, tensor, 2 microbatches": {
        "mesh": {"tensor": 2}, "rules": {"preset": ["fsdp", "tensor"]}, "train": {"accumulation": 2},
    },
}  # fmt: skip
QUICK = {
    ("ring", 4, "zero2, 2 microbatches"), ("ulysses", 4, "sequence parallelism, zero1, remat of names"),
    ("all_gather", 4, "fsdp over data and seq"),
}  # fmt: skip
ALL = [
    pytest.param(way, seq, name, marks=() if (way, seq, name) in QUICK else pytest.mark.prove)
    for way in CONTEXT_METHODS
    for seq in (2, 4, 8)
    for name, sections in LAYOUTS.items()
    if 8 % (seq * sections.get("mesh", {}).get("tensor", 1)) == 0
]


@pytest.mark.parametrize(("way", "seq", "name"), ALL)
def test_loss_and_gradients_are_those_of_one_device(way: str, seq: int, name: str) -> None:
    sections = dict(LAYOUTS[name])
    devices = seq if name == "alone" else None
    mesh = {**sections.pop("mesh", {}), "seq": seq}
    got = gradients_of(devices=devices, **sections, mesh=mesh, attention={"context_parallel": way})
    compare(got, alone(windows="model" not in sections))


def test_rows_that_do_not_divide_are_padded_and_not_scored() -> None:
    config = config_of(model=MODEL, mesh={"seq": 8}, data={"seq_len": 30})
    setup, one = setup_of(config), setup_of(config_of(model=MODEL, data={"seq_len": 30}), 1)
    assert setup.abstract_batch["tokens"].shape == (1, ROWS, LENGTH)
    assert setup.batch_shape.show_stored(30) == (
        "4 tokens of each sequence a device; 30 tokens do not divide and are padded to 32: 2 a sequence, 32 a step, "
        "not scored"
    )
    rows = rows_over_borders(30)
    loss, scored = evaluate(setup, rows)
    assert scored == int((rows["labels"] != IGNORE).sum())
    assert loss == pytest.approx(evaluate(one, rows)[0], rel=2e-6)


def evaluate(setup: Any, rows: dict[str, np.ndarray]) -> tuple[float, int]:
    batch = shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding)
    loss, scored = jit_evaluate(setup.step)(setup.init_state()["params"], batch)
    return float(loss), int(scored)


@pytest.mark.prove
@pytest.mark.parametrize("length", [25, 30])
def test_gradients_of_rows_that_do_not_divide(length: int) -> None:
    compare(gradients_of(length, mesh={"seq": 8}), alone(length))


@pytest.mark.parametrize("sizes", [{"seq": 4}, {"seq": 2, "tensor": 2}])
def test_each_device_holds_its_chunks_of_its_rows(sizes: dict[str, int]) -> None:
    setup = setup_of(config_of(mesh=sizes, train={"accumulation": 2}))
    n, data = sizes["seq"], 8 // sizes["seq"] // sizes.get("tensor", 1)
    rows = packed_rows(0)
    rows["tokens"] = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
    batch = shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding)
    assert owned_rows(setup.batch_shape, setup.batch_sharding, LENGTH) == (0, ROWS)
    order = zigzag_order(LENGTH, n)
    for shard in batch["tokens"].addressable_shards:
        assert shard.data.shape == (2, ROWS // 2 // data, LENGTH // n)
        _, _, lengths = shard.index
        columns = order[lengths]
        got = np.asarray(shard.data)
        for a, b in np.ndindex(got.shape[:2]):
            g = (shard.index[1].indices(ROWS // 2)[0] + b) * 2 + a
            np.testing.assert_array_equal(got[a, b], rows["tokens"][g, columns])


def test_length_is_padded_for_the_residual_stream_too() -> None:
    # 20 tokens: 2 x seq 2 = 4 divides them, seq 2 x tensor 4 of the residual stream does not.
    config = config_of(mesh={"seq": 2, "tensor": 4}, rules={"preset": ["tensor_sequence"]}, data={"seq_len": 20})
    assert setup_of(config).batch_shape.stored(20) == 24
    assert setup_of(config_of(mesh={"tensor": 4}, data={"seq_len": 20})).batch_shape.stored(20) == 20


def test_a_kept_output_is_not_computed_again() -> None:
    def transfers(remat: dict[str, Any]) -> int:
        setup = setup_of(config_of(mesh={"seq": 8}, remat=remat))
        lowered = jax.jit(setup.step.gradients).lower(setup.abstract["params"], setup.abstract_batch, 1.0)
        return lowered.as_text().count("stablehlo.collective_permute")

    # Forward: before the loop and in it; backward: keys likewise, their gradients in the loop and after it.
    assert transfers({}) == 6
    assert transfers({"policy": "names", "names": ["qkv", "attention_out"]}) == 6
    assert transfers({"policy": "full"}) == 8


@pytest.mark.prove
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("context_method", CONTEXT_METHODS)
def test_low_precision_follows_the_float32_curve(compute: str, context_method: str) -> None:
    batches = [rows_over_borders()] * 5
    low = config_of(
        precision={"compute": compute},
        mesh={"seq": 4},
        rules={"preset": ["zero2"]},
        attention={"context_parallel": context_method},
    )
    plain = train_on(setup_of(config_of(), 1), batches)[0]
    for got, want in zip(train_on(setup_of(low), batches)[0], plain, strict=True):
        assert got["scored_tokens"] == want["scored_tokens"]
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-2)


@pytest.mark.prove
def test_ten_updates_end_where_one_device_ends() -> None:
    batches = [packed_rows(seed) for seed in range(9)] + [rows_over_borders()]
    want = train_on(setup_of(config_of(), 1), batches)
    got = train_on(setup_of(config_of(mesh={"seq": 4}, rules={"preset": ["zero2"]})), batches)
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert ours["scored_tokens"] == theirs["scored_tokens"] and ours["fill"] == pytest.approx(theirs["fill"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    error, path = worst_relative_error(got[1]["params"], want[1]["params"])
    assert error < 1e-4, path


def test_backend_that_cannot_split_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention.backend dense cannot be used.*mesh.seq"):
        gradients_of(mesh={"seq": 2}, attention={"backend": "dense"})
