"""The package: pins agree, parts of `make prove` are whole, a built wheel works from another directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxtrain

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [text for line in lines if (text := line.partition("#")[0].strip())]


def test_dependencies_are_those_of_the_requirements_files() -> None:
    extras = PROJECT["optional-dependencies"]
    assert PROJECT["dependencies"] == requirements("requirements.txt")
    assert extras["plan"] == requirements("requirements-plan.txt")
    assert extras["dev"] == requirements("requirements-dev.txt")
    jax = next(line.partition("==")[2] for line in PROJECT["dependencies"] if line.startswith("jax=="))
    for cuda in ("cuda12", "cuda13"):
        assert extras[cuda] == [f"jax[{cuda}]=={jax}", *requirements("requirements-gpu.txt")]


def test_every_proof_is_in_one_part_of_make_prove() -> None:
    lines = re.findall(r"^PROVE_\w+ := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    paths = [ROOT / path for line in lines for path in line.split()]
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    assert len(files) == len(set(files)) and all(file.is_file() for file in files)
    marked = {file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.prove\b", file.read_text())}
    assert marked - {Path(__file__)} <= set(files)


@pytest.mark.prove
def test_a_wheel_works_from_another_directory(tmp_path: Path) -> None:
    def run(*command: str | Path, **more: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    build = "import os, sys; os.chdir(sys.argv[1]); from hatchling.build import build_wheel; build_wheel(sys.argv[2])"
    run(sys.executable, "-c", build, ROOT, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    script = site / "bin" / "jaxtrain"
    assert run(script, "--version", PYTHONPATH=str(site)) == f"jaxtrain {jaxtrain.__version__}\n"
    command = [script, "inspect", "llama3_8b", "--cluster", "h100_8x8", "--json"]
    shown = json.loads(run(*command, PYTHONPATH=str(site), JAX_PLATFORMS="cpu"))
    assert [row["bytes"] for row in shown["parameters"] if row["path"] == "embed/tokens"] == [128256 * 64 * 2]
