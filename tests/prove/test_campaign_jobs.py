"""Every fault of tools/faults/ under a supervisor or in several processes has its stated outcome."""

from __future__ import annotations

import pytest
from faults.campaign import faults
from faults.fault import Fault, inject
from faults.runs import Bench

JOBS = [pytest.param(group, fault, id=f"{group}: {fault.name}") for group, fault in faults(kinds=["jobs"])]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.prove
@pytest.mark.parametrize(("group", "fault"), JOBS)
def test_a_fault_of_a_job(bench: Bench, group: str, fault: Fault) -> None:
    outcome = inject(bench, group, fault)
    if outcome.result == "not run":
        pytest.skip(outcome.message)
    assert outcome.result == "passed", "\n".join(outcome.problems)
