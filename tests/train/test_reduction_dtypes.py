"""What a 16-bit step sums over tokens, it sums in float32: read from the lowered program, which no compiler changed."""

from __future__ import annotations

import math
import re

import jax
import pytest

from jaxtrain.config import load_config, replace
from jaxtrain.prove.layouts import parse_layout
from jaxtrain.prove.shrink import shrink
from jaxtrain.train.resolve import bind
from jaxtrain.train.step import lower_step

REDUCE = re.compile(r"stablehlo.reduce\(.*? applies stablehlo.add .*?: \(tensor<(\S+?)>, .*?\) -> tensor<(\S+?)>")
SCATTER = re.compile(r'"stablehlo.scatter"(?:.*\n){1,8}?.*?stablehlo.add .*? : tensor<(\S+?)>')


def elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x")[:-1])


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss_20b", "deepseek_v3"])
def test_no_sum_is_in_16_bits(name: str) -> None:
    small = replace(shrink(load_config(name)), "precision.compute=bfloat16")
    layout = parse_layout(small, "data=-1, rules.preset=[fsdp]", 8)
    setup = bind(layout.config, jax.devices()[: layout.devices])
    text = lower_step(setup.step, setup.abstract, setup.abstract_batch).as_text()
    sums = REDUCE.findall(text)
    assert len([into for _, into in sums if into.endswith("f32")]) > 20
    # Of several elements each; what the layout leaves to a sum over one shard adds nothing.
    assert [s for s in sums if s[1].endswith("bf16") and elements(s[0]) > elements(s[1])] == []
    added = SCATTER.findall(text)
    assert added and not [dtype for dtype in added if dtype != "f32"]
