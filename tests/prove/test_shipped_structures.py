"""`make prove`: verify every shipped dense structure; each shipped structure is in a part."""

from __future__ import annotations

import pytest
from structures import CONFIGS, MIXTURES, SETTINGS, STRUCTURES, prove_every_layout

from jaxtrain.config import load_config
from jaxtrain.prove.shrink import shrink


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in STRUCTURES if name not in (*MIXTURES, *SETTINGS)])
def test_every_layout_of_a_dense_structure(name: str) -> None:
    prove_every_layout(name)


def test_every_shipped_structure_is_covered() -> None:
    small = list(map(shrink, STRUCTURES.values()))
    assert all(shrink(load_config(f"models/{name}.yaml")) in small for name in CONFIGS)
