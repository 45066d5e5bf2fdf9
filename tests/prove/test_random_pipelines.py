"""Random pipelines of random models (stages, chunks, schedule, microbatches, packing) equal one device."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxtrain.config import validate
from jaxtrain.data.packing import PACKERS
from jaxtrain.pipeline.schedule import MAKERS
from jaxtrain.prove.shrink import BATCH, LAYERS, shrink
from jaxtrain.prove.verify import Verifier

# Each example compiles for seconds, so failing examples are not minimised.
QUIET: dict[str, Any] = {
    "deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "phases": [Phase.generate],
}  # fmt: skip
BATCH_OF = dict.fromkeys(PACKERS, BATCH) | {"none": 4 * BATCH}
"""Sequences that hold the documents of a step, by packer."""


@st.composite
def layers_of_stages(draw: st.DrawFn, layers: int, stages: int) -> list[int]:
    """Number of layers of each stage, at least one."""
    cuts = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
    return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """A model and a layout that the trainer must accept."""
    stages, chunks = draw(st.sampled_from([(2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2)]))
    layers = draw(st.integers(stages * chunks, LAYERS))
    split = draw(st.one_of(st.just("auto"), layers_of_stages(layers, stages * chunks)))
    slots = -(-layers // (stages * chunks)) if split == "auto" else max(split)
    every = draw(st.sampled_from([e for e in range(1, slots + 1) if slots % e == layers % e == 0]))
    microbatches, data = draw(st.integers(1, 4 * stages)), draw(st.sampled_from([1, 2]))
    packing, step = draw(st.sampled_from(sorted(PACKERS))), microbatches * data
    layout = {
        "pipe": stages, "data": data, "pipeline.schedule": draw(st.sampled_from(sorted(MAKERS))),
        "pipeline.chunks": chunks, "pipeline.stages": str(split).replace(" ", ""), "train.accumulation": microbatches,
        "train.global_batch": step * math.ceil(BATCH_OF[packing] / step), "data.packing": packing,
        "remat.policy": "full", "remat.every": every,
    }  # fmt: skip
    model = {
        "n_layers": layers, "tied_head": draw(st.booleans()), "windows": draw(st.sampled_from([[None], [None, 3]])),
        "qk_norm": draw(st.booleans()),
    }  # fmt: skip
    return model, ", ".join(f"{name}={value}" for name, value in layout.items())


def check_pipeline(model: dict[str, Any], layout: str) -> None:
    verifier = Verifier(shrink(validate({"model": {"n_heads": 4, "d_model": 64, **model}})), jax.devices())
    result = verifier.run(verifier.compile(layout))
    assert result.status == "passed", result


@settings(max_examples=2, derandomize=True, **QUIET)
@given(pipelines())
def test_a_few_random_pipelines(drawn: tuple[dict[str, Any], str]) -> None:
    check_pipeline(*drawn)


@pytest.mark.prove
@settings(max_examples=60, **QUIET)
@given(pipelines())
def test_many_random_pipelines(drawn: tuple[dict[str, Any], str]) -> None:
    check_pipeline(*drawn)
