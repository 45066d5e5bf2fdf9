"""Twelve updates of each model family equal PyTorch's, on one device and laid out: losses and gradient norms."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from reference import CONFIGS, DENSE, MIXTURES, load, places, shifted
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
MIXTURE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "expert=2 x tensor=2 x data=2": (
        8, {"mesh": {"expert": 2, "tensor": 2}, "rules": {"preset": ["tensor"]}, "train": {"accumulation": 2}},
    ),
    "expert=4 x data=2, fsdp": (8, {"mesh": {"expert": 4}, "rules": {"preset": ["fsdp"]}}),
}  # fmt: skip
QUICK = [
    ("llama", "tensor=2 x data=2, fsdp"), ("gpt2", "data=4, zero2"), ("mistral", "one device, 4 microbatches"),
    ("mixtral", "expert=4 x data=2, fsdp"), ("deepseek_v3", "expert=2 x tensor=2 x data=2"),
]  # fmt: skip
CASES = [*itertools.product(DENSE, LAYOUTS), *itertools.product(MIXTURES, MIXTURE_LAYOUTS)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.prove) for case in CASES],
)
def test_twelve_updates(family: str, layout: str) -> None:
    reference = load(family)
    inputs, labels = reference.arrays["train_inputs"], reference.arrays["train_labels"]
    updates, rows, length = inputs.shape
    devices, laid = {**LAYOUTS, **MIXTURE_LAYOUTS}[layout]
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
        # Rounding may decide a near tie of two experts: measured for deepseek_v3 under fsdp, where the expert of one
        # token changes in the last update and the loss by 7e-5. Until then all loads and losses are the same.
        slack = 1e-5 if family in DENSE or update < 8 else 1e-3
        assert float(metrics["loss"]) == pytest.approx(reference.arrays["train_loss"][update], rel=slack)
        assert float(metrics["grad_norm"]) == pytest.approx(reference.arrays["train_grad_norm"][update], rel=10 * slack)
