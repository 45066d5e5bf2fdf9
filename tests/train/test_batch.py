"""Batch arithmetic and the map from global rows to microbatches."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of

from jaxtrain.config import ConfigError, TrainConfig
from jaxtrain.train.batch import owned_rows, shard_batch, split_batch

SIZES = {"data": 8, "pipe": 1, "tensor": 8, "seq": 1, "expert": 1}


def test_worked_values_of_the_global_batch() -> None:
    # Requirements section 4: 2 x 8 x 8 = 128, 2 x 64 x 8 = 1,024; the tensor axis never multiplies in.
    plan = split_batch(TrainConfig(global_batch=128, microbatch=2), SIZES, ("data",))
    assert (plan.replicas, plan.accumulation, plan.microbatch) == (8, 8, 2)
    plan = split_batch(TrainConfig(global_batch=1024, accumulation=8), {**SIZES, "data": 64}, ("data",))
    assert (plan.replicas, plan.accumulation, plan.microbatch) == (64, 8, 2)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"global_batch": 130, "microbatch": 2}, "train.global_batch 130 is not train.microbatch 2 x 8 replicas"),
        ({"global_batch": 12}, "train.global_batch 12 does not divide into 8 replicas (data 8)"),
        ({"global_batch": 16, "accumulation": 3}, "accumulation 3 = 24"),
        ({"global_batch": 64, "microbatch": 2, "accumulation": 8}, "= 128"),
    ],
)
def test_numbers_that_disagree_show_the_arithmetic(train: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_batch(TrainConfig(**train), SIZES, ("data",))
    assert words in str(error.value)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_row_lands_in_its_microbatch_whatever_the_mesh(accumulation: int, tensor: int) -> None:
    setup = setup_of(config_of(train={"accumulation": accumulation}, mesh={"tensor": tensor}), 4)
    rows = packed_rows(0)
    rows["tokens"] = np.arange(rows["tokens"].size, dtype=np.int32).reshape(rows["tokens"].shape)
    lo, hi = owned_rows(setup.batch_shape, setup.batch_sharding, rows["tokens"].shape[1])
    assert (lo, hi) == (0, 16)
    got = jax.device_get(shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding)["tokens"])
    for g in range(16):
        np.testing.assert_array_equal(got[g % accumulation, g // accumulation], rows["tokens"][g])
