"""Twelve updates of five model families equal PyTorch's, on one device and laid out: losses and gradient norms."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from reference import CONFIGS, FAMILIES, load, places, shifted
from runs import setup_of

from jaxtrain.config import validate
from jaxtrain.train.batch import place
from jaxtrain.train.step import compile_step

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device, 4 microbatches": (1, {"train": {"accumulation": 4}}),
    "tensor=2 x data=2, fsdp": (
        4, {"mesh": {"tensor": 2}, "rules": {"preset": ["fsdp", "tensor_sequence"]}, "train": {"accumulation": 2}},
    ),
    "data=4, zero2": (4, {"rules": {"preset": ["zero2"]}, "train": {"accumulation": 2}}),
}  # fmt: skip
QUICK = [("llama", "tensor=2 x data=2, fsdp"), ("gpt2", "data=4, zero2"), ("mistral", "one device, 4 microbatches")]
REST = [(f, name) for f in FAMILIES for name in LAYOUTS if (f, name) not in QUICK]


@pytest.mark.parametrize(
    ("family", "layout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.prove) for case in REST)]
)
def test_twelve_updates(family: str, layout: str) -> None:
    reference = load(family)
    inputs, labels = reference.arrays["train_inputs"], reference.arrays["train_labels"]
    updates, rows, length = inputs.shape
    devices, laid = LAYOUTS[layout]
    model = (
        {**CONFIGS[family], "rope": CONFIGS[family]["rope"].model_dump()}
        if "rope" in CONFIGS[family]
        else CONFIGS[family]
    )
    config = validate({
        **laid,
        "model": model,
        "data": {"length": length, "tokenizer": {"vocab_size": 128}},
        "train": {"updates": updates, "global_batch": rows, **laid.get("train", {})},
        "optimizer": {
            "learning_rate": 3e-3, "schedule": "constant", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
            "weight_decay": 0.1, "clip_norm": 1.0,
        },
    })  # fmt: skip
    setup = setup_of(config, devices)
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    state = setup.create_state()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract["params"])
    state["params"] = jax.device_put(reference.params, shardings)
    for update in range(updates):
        positions, segments = places(inputs[update])
        fields = {
            "tokens": inputs[update],
            "labels": shifted(labels[update]),
            "positions": positions,
            "segments": segments,
        }
        batch = {name: np.ascontiguousarray(field, np.int32) for name, field in fields.items()}
        state, metrics = step(state, place(batch, 0, setup.plan, setup.batch_sharding))
        assert float(metrics["loss"]) == pytest.approx(reference.arrays["train_loss"][update], rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(reference.arrays["train_grad_norm"][update], rel=1e-4)
