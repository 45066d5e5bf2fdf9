"""Random small models under random layouts: accepted layouts pass, and refusals name a setting."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, RunConfig, validate
from jaxtrain.prove.shrink import shrink
from jaxtrain.prove.verify import Verifier

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
SETTING = re.compile(r"\b(mesh|rules|train|model|remat|data|attention|pipeline)\.[a-z_]+|--devices|activation [a-z]+")

models = st.fixed_dictionaries({
    "n_heads": st.sampled_from([1, 2, 3, 4, 8]), "n_layers": st.integers(1, 4), "head_dim": st.sampled_from([4, 5, 8]),
    "norm": st.sampled_from(["rmsnorm", "layernorm"]), "activation": st.sampled_from(["swiglu", "gelu", "relu2"]),
    "positions": st.sampled_from(["rope", "learned", "none"]), "tied_head": st.booleans(), "qkv_bias": st.booleans(),
    "mlp_bias": st.booleans(), "qk_norm": st.booleans(), "logit_softcap": st.sampled_from([None, 5.0]),
    "windows": st.lists(st.sampled_from([None, 3, 9]), min_size=1, max_size=2),
})  # fmt: skip
layouts = st.fixed_dictionaries({
    "data": st.sampled_from([1, 2, 4, -1]), "tensor": st.sampled_from([1, 2, 3, 4]),
    "rules.preset": st.lists(
        st.sampled_from(["zero1", "zero2", "fsdp", "tensor", "tensor_sequence"]), min_size=1, max_size=2
    ),
    "train.accumulation": st.sampled_from([1, 2, 3, 4]), "remat.policy": st.sampled_from(["none", "full", "dots"]),
    "remat.every": st.sampled_from([1, 2]), "data.packing": st.sampled_from(["first_fit", "best_fit"]),
})  # fmt: skip


def config_of(model: dict[str, Any]) -> RunConfig | None:
    """The shrunk configuration; None if the model is refused with a reason."""
    try:
        return shrink(validate({"model": {**model, "d_model": 64}}))
    except ConfigError as error:
        assert SETTING.search(str(error)), error
        return None


def check_layout(model: dict[str, Any], layout: dict[str, Any]) -> str:
    """An accepted layout must pass; a refusal must name a setting."""
    config = config_of(model)
    if config is None:
        return "refused"
    verifier = Verifier(config, jax.devices())
    compiled = verifier.compile(", ".join(f"{key}={str(value).replace(chr(39), '')}" for key, value in layout.items()))
    result = verifier.run(compiled)
    if result.status == "refused":
        assert SETTING.search(result.reason), result.reason
    else:
        assert result.status == "passed", result
    return result.status


@settings(max_examples=4, derandomize=True, **QUIET)  # type: ignore[arg-type]
@given(models, layouts)
def test_a_few_random_configurations(model: dict[str, Any], layout: dict[str, Any]) -> None:
    check_layout(model, layout)


@pytest.mark.prove
@settings(max_examples=60, **QUIET)  # type: ignore[arg-type]
@given(models, layouts)
def test_many_random_configurations(model: dict[str, Any], layout: dict[str, Any]) -> None:
    check_layout(model, layout)
