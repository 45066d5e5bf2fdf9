"""Random pipelines of random models: stages, chunks, schedule, microbatches, runs, rows; each equals one device."""

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
from jaxtrain.prove.shrink import LAYERS, ROWS, shrink
from jaxtrain.prove.verify import Verifier

# Each example compiles for seconds: one that fails is told as it was drawn.
QUIET: dict[str, Any] = {
    "deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "phases": [Phase.generate],
}  # fmt: skip
ROWS_OF = dict.fromkeys(PACKERS, ROWS) | {"none": 4 * ROWS}
"""Rows that hold the documents of an update, as each packer lays them."""


@st.composite
def runs_of(draw: st.DrawFn, layers: int, runs: int) -> list[int]:
    """Layers of each run, at least one."""
    cuts = sorted(draw(st.permutations(range(1, layers)))[: runs - 1])
    return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """A model and a layout that the trainer must accept."""
    stages, chunks = draw(st.sampled_from([(2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2)]))
    layers = draw(st.integers(stages * chunks, LAYERS))
    asked = draw(st.one_of(st.just("auto"), runs_of(layers, stages * chunks)))
    places = -(-layers // (stages * chunks)) if asked == "auto" else max(asked)
    every = draw(st.sampled_from([e for e in range(1, places + 1) if places % e == layers % e == 0]))
    microbatches, data = draw(st.integers(1, 4 * stages)), draw(st.sampled_from([1, 2]))
    packing, step = draw(st.sampled_from(sorted(PACKERS))), microbatches * data
    layout = {
        "pipe": stages, "data": data, "pipeline.schedule": draw(st.sampled_from(sorted(MAKERS))),
        "pipeline.chunks": chunks, "pipeline.stages": str(asked).replace(" ", ""), "train.accumulation": microbatches,
        "train.global_batch": step * math.ceil(ROWS_OF[packing] / step), "data.packing": packing,
        "remat.policy": "full", "remat.every": every,
    }  # fmt: skip
    model = {
        "n_layers": layers, "tied_head": draw(st.booleans()), "windows": draw(st.sampled_from([[None], [None, 3]])),
        "qk_norm": draw(st.booleans()),
    }  # fmt: skip
    return model, ", ".join(f"{name}={value}" for name, value in layout.items())


def holds(model: dict[str, Any], layout: str) -> None:
    proof = Verifier(shrink(validate({"model": {"n_heads": 4, "d_model": 64, **model}})), jax.devices())
    result = proof.run(proof.compile(layout))
    assert result.status == "passed", result


@settings(max_examples=2, derandomize=True, **QUIET)
@given(pipelines())
def test_a_few_random_pipelines(drawn: tuple[dict[str, Any], str]) -> None:
    holds(*drawn)


@pytest.mark.prove
@settings(max_examples=60, **QUIET)
@given(pipelines())
def test_many_random_pipelines(drawn: tuple[dict[str, Any], str]) -> None:
    holds(*drawn)
