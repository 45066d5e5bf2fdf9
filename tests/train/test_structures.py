"""Every shipped model structure, shrunk: each gradient leaf is the same under each layout (make prove)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import LENGTH, VOCAB, config_of, packed_rows, setup_of, worst_relative_error
from test_layouts import DEVICES, LAYOUTS

from jaxtrain.config import CONFIG_ROOT, load_config
from jaxtrain.train.batch import place

STRUCTURES = sorted(path.stem for path in (CONFIG_ROOT / "models").glob("*.yaml"))
EXTRA: dict[str, dict[str, Any]] = {
    "soft caps, windows, relu2": {
        "attention_softcap": 20.0, "logit_softcap": 10.0, "windows": [5, None], "activation": "relu2",
        "tied_head": True,
    },
}  # fmt: skip


def shrunk(name: str) -> dict[str, Any]:
    """A structure with small widths: same head ratio, norms, biases, activation, positions, tying, windows."""
    if name in EXTRA:
        return EXTRA[name]
    model = load_config(Path("models") / f"{name}.yaml").model
    kv_heads = 8 // min(model.n_heads // model.kv_heads, 4)
    small = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 4, "n_heads": 8, "n_kv_heads": kv_heads, "head_dim": 8}
    windows = [None if w is None else 7 for w in model.windows]
    return {**model.model_dump(), **small, "d_ff": 96, "max_length": LENGTH, "windows": windows}


@pytest.mark.prove
@pytest.mark.parametrize("structure", [*STRUCTURES, *EXTRA])
def test_same_gradient_of_every_leaf(structure: str) -> None:
    rows = packed_rows(0)

    def gradients(devices: int | None, **sections: Any) -> Any:
        setup = setup_of(config_of(model=shrunk(structure), **sections), devices)
        batch = place(rows, 0, setup.plan, setup.batch_sharding)
        step = jax.jit(lambda p, b: setup.step.gradients(p, b, 3.0)[0])
        return jax.device_get(step(setup.create_state()["params"], batch))

    want = gradients(1)
    for name, sections in LAYOUTS.items():
        got = gradients(DEVICES.get(name), **sections)
        error, path = worst_relative_error(*(_without_zeros(tree, structure) for tree in (got, want)))
        assert error < 2e-5, f"{name}: {path}"


def _without_zeros(gradients: Any, structure: str) -> Any:
    """Without rotation a key bias adds one number to all scores of a query: its gradient is zero, but for noise."""
    attention = gradients["layers"]["attention"]
    if shrunk(structure).get("positions") == "learned" and "bias" in attention["key"]:
        noise = np.abs(attention["key"]["bias"]).max()
        assert noise < 1e-6 * np.abs(attention["query"]["bias"]).max()
        attention = {**attention, "key": {"weight": attention["key"]["weight"]}}
    return {**gradients, "layers": {**gradients["layers"], "attention": attention}}
