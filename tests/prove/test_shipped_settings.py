"""`make prove`: verify settings that no shipped structure has."""

from __future__ import annotations

import pytest
from structures import SETTINGS, prove_every_layout


@pytest.mark.prove
@pytest.mark.parametrize("name", SETTINGS)
def test_every_layout_of_other_settings(name: str) -> None:
    prove_every_layout(name)
