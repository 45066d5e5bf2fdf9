"""Manifests: read by the schedulers' own models, run by a shell, and refused where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models

from jaxtrain.cli import main

OVERRIDES = ["--train.steps", "7", "--data.tokenizer.path", 'my $HOME\'s "tokenizer".json', "--eval.every", "null"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", "llama3_8b", *arguments]) == 0
    return capsys.readouterr().out


def test_the_batch_script_starts_the_command_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = printed(
        capsys, "--slurm", "--run", "/shared/a run", "--restarts", "1234567", "--time", "1:00:00", *OVERRIDES
    )
    options = dict(line[8:].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH"))
    assert options["--nodes"] == options["--gpus-per-node"] == "8" and options["--ntasks-per-node"] == "1"
    assert options["--signal"] == "TERM@180" and options["--time"] == "1:00:00" and "--requeue" in options
    assert "--partition" not in options and options["--job-name"] == "jaxtrain-a-run"
    # A scheduler that records what it is told, and a run that was saved after a signal.
    for name, status in (("srun", 75), ("scontrol", 0)):
        tool = tmp_path / name
        tool.write_text(
            f"#!/usr/bin/env python3\nimport json, sys\n"
            f"open({str(tmp_path / (name + '.json'))!r}, 'w').write(json.dumps(sys.argv[1:]))\nsys.exit({status})\n"
        )
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash", "-c", script], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 75 and not done.stderr
    words = json.loads((tmp_path / "srun.json").read_text())
    assert words[words.index("launch") :] == [
        "launch", "llama3_8b", "--run", "/shared/a run", "--processes", "1", "--restarts", "1234567", "--train.steps=7",
        "--data.tokenizer.path=my $HOME's \"tokenizer\".json", "--eval.every=null",
    ]  # fmt: skip
    assert json.loads((tmp_path / "scontrol.json").read_text()) == ["requeue", "12"]


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_job_set_is_one_by_the_models_of_the_api(nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--image", "here/jaxtrain:1", "--claim", "disk:/shared", "--run", "/shared/Run_1", "--namespace", "ml")
    found = yaml.safe_load(printed(capsys, "--kubernetes", "--nodes", str(nodes), *place, *OVERRIDES))
    # A field that the API does not know is not in what its models give back.
    spec = models.JobsetV1alpha2JobSet.from_dict(found)
    assert spec.to_dict() == found
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert (
        job["completions"] == job["parallelism"] == nodes and container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    )
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 180
    assert '--data.tokenizer.path=my $$HOME\'s "tokenizer".json' in container["command"]
    where = "jaxtrain-run-1-nodes-0-0.jaxtrain-run-1:23456"
    assert (where in container["command"]) == ("$(JOB_COMPLETION_INDEX)" in container["command"]) == (nodes > 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slurm", "--kubernetes"], "exclude each other"),
        (["--slurm", "--image", "x"], "--image x has no effect without --kubernetes"),
        (["--processes", "1", "--partition", "gpu"], "--partition gpu has no effect without --slurm"),
        (["--slurm", "--node-rank", "0"], "--node-rank goes with processes that are started here"),
        (["--kubernetes", "--image", "x", "--claim", "disk", "--run", "/shared/r"], "--claim CLAIM:/PATH"),
        (["--kubernetes", "--image", "x", "--claim", "disk:/shared", "--run", "runs/r"], "--run below /shared"),
        (["--slurm", "--train.step", "3"], "train.step"),
        (["--slurm", "--nodes", "0"], "--nodes 0: use a number from 1"),
        (["--slurm", "--processes", "0"], "--processes 0: use a number from 1"),
        (["--slurm", "--grace", "-70"], "--grace -70: use a number from 0"),
        (["--slurm", "--partition", "a b"], "--partition 'a b' is no name"),
    ],
)
def test_faults(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "llama3_8b", *arguments]) == 2
    assert words in capsys.readouterr().err
