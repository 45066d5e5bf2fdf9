"""Recipes of 8 bits in the train step: layers that are left out, and runs that change their recipe."""

from __future__ import annotations

import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of, train_on

from jaxtrain.config import ConfigError, RunConfig, load_config, replace
from jaxtrain.nn.layer_table import split_ends
from jaxtrain.prove.layouts import without_layout
from jaxtrain.prove.shrink import shrink

BASE = config_of(precision={"compute": "bfloat16"})


def losses(config: RunConfig) -> list[float]:
    """The losses of two steps on one device."""
    metrics, *_ = train_on(setup_of(config, 1), [packed_rows(seed) for seed in range(2)])
    return [row["loss"] for row in metrics]


def test_layers_that_are_left_out_compute_as_without_a_recipe() -> None:
    plain, low = losses(BASE), losses(replace(BASE, "precision.recipe=float8"))
    assert plain != low and np.allclose(plain, low, rtol=1e-2)
    layers = BASE.model.n_layers
    some = losses(replace(BASE, "precision.recipe=float8", "precision.recipe_skip_first=1"))
    assert some not in (plain, low)
    with pytest.raises(ConfigError, match=f"leave none of the {layers} layers"):
        setup_of(replace(BASE, "precision.recipe=float8", f"precision.recipe_skip_last={layers}"), 1)
    with pytest.raises(ConfigError, match="all stages run the same program"):
        setup_of(replace(BASE, "precision.recipe=float8", "precision.recipe_skip_last=1", "mesh.pipe=2"), 2)


@pytest.mark.parametrize("name", ["models/llama3_8b.yaml", "deepseek_v3.yaml", "moe_tiny.yaml"])
def test_the_ends_are_runs_of_their_own(name: str) -> None:
    model = shrink(load_config(name)).model
    whole = split_ends(model, 0, 0)
    assert all(follows for _, follows in whole) and sum(run.layers for run, _ in whole) == model.n_layers
    parts = split_ends(model, 1, 2)
    kept = [follows for run, follows in parts for _ in range(run.layers)]
    assert kept == [False] + [True] * (model.n_layers - 3) + [False] * 2


@pytest.mark.prove
def test_a_mixture_reports_every_layer_when_its_ends_are_left_out() -> None:
    small = replace(without_layout(shrink(load_config("deepseek_v3.yaml"))), "precision.recipe=float8", "model.mtp=0")
    rows = packed_rows(0, small.train.global_batch, small.data.seq_len, small.model.vocab_size)
    found = []
    for skip in (0, 2):
        metrics, *_ = train_on(setup_of(replace(small, f"precision.recipe_skip_last={skip}"), 1), [rows])
        found.append(np.array(metrics[0]["expert_load"]))
    assert found[0].shape == found[1].shape and (found[0].sum(axis=1) == found[1].sum(axis=1)).all()
