"""Names of mixtures: what no rule can shard, and experts spread over what would split their width."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec

from jaxtrain.config import AXES, RulesConfig
from jaxtrain.mesh.param import Param
from jaxtrain.mesh.resolution import spec_for
from jaxtrain.mesh.rules import WHOLE, resolve_rules

SIZES = dict.fromkeys(AXES, 2)
UP = Param((2, 8, 16, 32), ("layers", "experts", "embed", "mlp"))


def test_no_rule_shards_whole() -> None:
    with pytest.raises(ValueError, match="whole"):
        RulesConfig(**{WHOLE: "data"})
    resolved = spec_for(Param((16, 8), ("embed", WHOLE)), resolve_rules(RulesConfig(preset=["fsdp"])), SIZES)
    assert resolved.spec == PartitionSpec("data", None) and not resolved.findings


@pytest.mark.parametrize(
    ("experts", "want"),
    [
        ("expert", PartitionSpec("pipe", "expert", "data", "tensor")),
        (["expert", "tensor"], PartitionSpec("pipe", ("expert", "tensor"), "data", None)),
    ],
)
def test_the_width_of_an_expert_yields_to_spread_experts(experts: str | list[str], want: PartitionSpec) -> None:
    rules = resolve_rules(RulesConfig(preset=["fsdp", "tensor"], experts=experts))
    resolved = spec_for(UP, rules, SIZES)
    assert resolved.spec == want and not resolved.findings
    assert ("experts are spread over it" in resolved.reasons[-1].note) == (experts != "expert")


def test_other_names_still_cannot_share_an_axis_with_experts() -> None:
    rules = resolve_rules(RulesConfig(experts="data", embed="data"))
    assert [finding.kind for finding in spec_for(UP, rules, SIZES).findings] == ["twice"]
