"""Training with tiled attention, sharded, accumulated and with a z-loss, against the plain softmax on one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of, worst_relative_error

from jaxtrain.ops import blocks
from jaxtrain.ops.reference import use_reference
from jaxtrain.train.batch import shard_batch


def gradients(setup, rows):
    batch = shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding)
    found, sums = jax.jit(setup.step.gradients)(setup.init_state()["params"], batch, 1.0)
    return jax.device_get(found), {name: float(value) for name, value in sums.items()}


MODEL = {"windows": [None, 9], "attention_softcap": 20.0}
LAYOUTS = {
    "ddp": ({"data": 4}, ["ddp"], {}),
    "zero2 x tensor, kv heads whole, accumulated": ({"data": 1, "tensor": 8}, ["zero2", "tensor"], {"accumulation": 2}),
    "fsdp x tensor sequence": ({"data": 4, "tensor": 2}, ["fsdp", "tensor_sequence"], {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_leaf(layout, monkeypatch):
    monkeypatch.setattr(blocks, "TILE", 8)
    mesh, preset, train = LAYOUTS[layout]
    rows = packed_rows(3)
    config = config_of(
        model=MODEL, mesh=mesh, rules={"preset": preset}, train={"z_loss": 0.05, **train}, attention={"backend": "xla"}
    )
    got, sums = gradients(setup_of(config, 4 if layout == "ddp" else 8), rows)
    with use_reference():
        want, expected = gradients(setup_of(config_of(model=MODEL, train={"z_loss": 0.05}), 1), rows)
    error, where = worst_relative_error(got, want)
    assert error < 2e-5, where
    assert sums.keys() == expected.keys() == {"loss", "scored", "z_loss"}
    np.testing.assert_allclose([sums[k] for k in expected], list(expected.values()), rtol=2e-6)
