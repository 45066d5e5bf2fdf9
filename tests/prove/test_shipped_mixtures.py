"""`make prove`: verify every shipped mixture of experts."""

from __future__ import annotations

import pytest
from structures import MIXTURES, prove_every_layout


@pytest.mark.prove
@pytest.mark.parametrize("name", MIXTURES)
def test_every_layout_of_a_mixture(name: str) -> None:
    prove_every_layout(name)
