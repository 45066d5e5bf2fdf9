"""The checkpoints of two steps, copied for each test."""

import subprocess

import pytest
from stores import two_checkpoints


@pytest.fixture
def two(tmp_path, tmp_path_factory):
    base = tmp_path_factory.getbasetemp() / "two-steps"
    subprocess.run(["cp", "-r", two_checkpoints(base), tmp_path / "run"], check=True)
    return tmp_path / "run"
