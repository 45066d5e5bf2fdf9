"""In a single process join and waits do nothing, and guard passes results and errors on."""

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.launch.coordination import wait_for_all
from jaxtrain.launch.distributed import guard, join, under_scheduler


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NODELIST", "WORLD_SIZE", "PMI_SIZE", "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_joins_nothing():
    import jax

    join()
    assert not jax.distributed.is_initialized() and not under_scheduler()
    wait_for_all("alone")
    wait_for_all("alone")


def test_guard_passes_results_and_errors_on():
    assert guard(lambda: 0) == 0
    assert guard(lambda: 3) == 3

    def fail():
        raise ConfigError("train.steps is 0")

    with pytest.raises(ConfigError, match=r"train.steps"):
        guard(fail)
