"""Every fault of tools/faults/ in one process has its stated outcome, and the losses of the unbroken run."""

from __future__ import annotations

import pytest
from faults.campaign import faults
from faults.fault import Fault, inject
from faults.runs import Bench

ALONE = [pytest.param(group, fault, id=f"{group}: {fault.name}") for group, fault in faults(kinds=["alone"])]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def test_the_campaign_has_at_least_80_faults() -> None:
    names = [f"{group}: {fault.name}" for group, fault in faults()]
    assert len(names) >= 80
    assert len(set(names)) == len(names)


@pytest.mark.prove
@pytest.mark.parametrize(("group", "fault"), ALONE)
def test_a_fault_of_one_process(bench: Bench, group: str, fault: Fault) -> None:
    outcome = inject(bench, group, fault)
    if outcome.result == "not run":
        pytest.skip(outcome.message)
    assert outcome.result == "passed", "\n".join(outcome.problems)
