"""How often the load of every expert is recorded."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.train.experts import loads_every


@pytest.mark.parametrize(
    ("name", "every"), [("tiny", 1), ("moe_tiny", 1), ("mixtral_8x7b", 1), ("qwen3_30b_a3b", 3), ("deepseek_v3", 8)]
)
def test_many_experts_do_not_fill_the_disk(name: str, every: int) -> None:
    # DeepSeek-V3: 59 mixtures (one of multi-token prediction) of 256 experts would be 15,104 numbers a step.
    assert loads_every(load_config(name).model) == every
