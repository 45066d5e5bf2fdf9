"""What a resumed run may change, and new runs that start from another one's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_resume import config_tree, write_corpus

from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.cli import main
from jaxtrain.config import ConfigError, RunConfig, validate
from jaxtrain.observe.events import read_events
from jaxtrain.train.loop import train
from jaxtrain.train.resume import Source

STEPS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and the run `run` of 8 steps, checkpoints at 4 and 8."""
    folder = tmp_path_factory.mktemp("changes")
    write_corpus(folder / "corpus")
    train(settings(folder), folder / "run", quiet=True)
    return folder


def settings(folder: Path, **sections: Any) -> RunConfig:
    tree = config_tree(folder)
    base = {"train": {"steps": STEPS}, "checkpoint": {"every": 4}, "eval": {"every": 4, "batches": 1}}
    for name in {*base, *sections}:
        tree[name] = tree.get(name, {}) | base.get(name, {}) | sections.get(name, {})
    return validate(tree)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def meta(run: Path, step: int) -> dict[str, Any]:
    return CheckpointReader(run / "checkpoints").read_meta(step)


def test_a_resume_changes_what_leaves_the_state_valid(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    changed = settings(
        trained,
        train={"steps": 10, "z_loss": 1e-4},
        optimizer={"learning_rate": 1e-3, "warmup": 0, "schedule": "constant", "clip_norm": 0.5, "beta2": 0.98},
        precision={"compute": "float16", "scale_init": 256.0},
    )
    train(changed, run)
    lines = capsys.readouterr().out
    assert "optimizer.learning_rate changed from 0.01 to 0.001 since the last start" in lines
    assert "the learning rate of the next step is 0.001, with the settings before it was 0.001" not in lines
    last = rows(run)
    assert [row["step"] for row in last] == list(range(1, 11)) and last[-1]["learning_rate"] == pytest.approx(1e-3)
    assert last[-1]["loss_scale"] == 256.0 and last[-1]["loss"] < last[0]["loss"]
    starts = [event for event in read_events(run) if event["kind"] == "start"]
    assert any("precision.compute" in line for line in starts[-1]["changes"]) and starts[0]["changes"] == []
    assert meta(run, 10)["config"]["optimizer"]["learning_rate"] == 1e-3
    for sections, key in (
        ({"model": {"d_ff": 96}}, "model.d_ff"),
        ({"train": {"seed": 1}}, "train.seed"),
        ({"data": {"packing": "concat"}}, "data.packing"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name"),
    ):
        with pytest.raises(ConfigError, match=rf"another configuration:\n(.*\n)*  {key}: .*\n(.*\n)*.*--from"):
            train(settings(trained, **sections), run, quiet=True)


def test_more_steps_under_a_schedule_say_what_happens_to_the_learning_rate(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    train(settings(trained, train={"steps": 16}), run)
    before, after = rows(run)[STEPS - 1]["learning_rate"], rows(run)[STEPS]["learning_rate"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the learning rate of the next")]
    assert len(lines) == 1 and f"is {after:.3g}, with the settings before it was 0.001 (x " in lines[0]
    assert after > 5e-3 > before
    assert "ends at train.steps, 8 before and 16 now; optimizer.total 8 keeps the schedule as it was" in lines[0]
    with pytest.raises(
        ConfigError, match=r"exceeds the schedule's end, 1 steps \(train.steps\).*or set optimizer.total"
    ):
        train(settings(trained, train={"steps": 1}), tmp_path / "short", quiet=True)


def test_a_new_run_starts_from_another_ones_weights(trained: Path, tmp_path: Path) -> None:
    new = settings(
        trained, train={"steps": 2, "seed": 5, "accumulation": 4}, mesh={"pipe": 2, "tensor": 2, "data": 2},
        rules={"preset": ["fsdp", "tensor"]}, pipeline={"schedule": "1f1b"},
        precision={"compute": "bfloat16"}, optimizer={"learning_rate": 1e-4},
    )  # fmt: skip
    old = trained / "run"
    train(new, tmp_path / "new", quiet=True, source=Source(old))
    first = rows(tmp_path / "new")[0]
    assert first["step"] == 1 and first["learning_rate"] < 1e-4 + 1e-9
    assert first["eval_loss_before"] == pytest.approx(rows(old)[-1]["eval_loss"], abs=0.02)
    origin = meta(tmp_path / "new", 2)["origin"]
    assert (origin["run"], origin["step"], origin["optimizer"]) == (str(old), STEPS, False)
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (old / "tokenizer.json").read_bytes()
    # The record stays when the run resumes.
    more = new.model_copy(update={"train": new.train.model_copy(update={"steps": 3})})
    assert train(more, tmp_path / "new", quiet=True, source=Source(old))["resumed_from"] == 2
    assert meta(tmp_path / "new", 3)["origin"] == origin
    with pytest.raises(ConfigError, match=r"is a run that started from .*/run, it cannot start from .*checkpoints/4"):
        train(more, tmp_path / "new", quiet=True, source=Source(old / "checkpoints" / "4"))


def test_the_optimizer_state_comes_along_when_it_is_asked_for(trained: Path, tmp_path: Path) -> None:
    old, run = trained / "run", tmp_path / "run"
    words = ["train", str(old / "config.yaml"), "--run", str(run), "--from", str(old / "checkpoints" / "4"), "--json"]
    assert main([*words, "--from-optimizer", "--optimizer.learning_rate=1e-30", "--train.steps", "3"]) == 0

    def moments(run: Path, step: int) -> list[Any]:
        from jaxtrain.checkpoint.order import CheckpointOrder
        from jaxtrain.train.resolve import bind

        layout = CheckpointOrder(bind(settings(trained))).checkpoint_layout
        found = CheckpointReader(run / "checkpoints").restore(layout, only=step)
        assert found is not None
        return [np.asarray(leaf) for leaf in jax.tree.leaves({k: found.state[k] for k in ("params", "opt")})]

    now, then = moments(run, 3), moments(old, 4)
    # Three steps at a learning rate of nothing: the same weights; the count of the moments went on from 4.
    counts = [int(leaf) for leaf in now if leaf.ndim == 0]
    assert counts == [7]
    assert sum(np.array_equal(a, b) for a, b in zip(now, then, strict=True)) >= len(now) // 3
    assert meta(run, 3)["origin"]["optimizer"] is True and meta(run, 3)["updates"] == 3


def test_wrong_sources_are_one_message(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = str(tmp_path / "run"), str(trained / "run" / "config.yaml")
    for words, message in (
        (["--from", str(tmp_path)], "is not a run"),
        (["--from", str(trained / "run" / "checkpoints" / "5")], "is not there"),
        (["--from-optimizer"], "--from-optimizer needs --from"),
        (["--from", str(trained / "run"), "--model.d_ff", "96"], "holds the state of another configuration"),
        (
            ["--from", str(trained / "run"), "--from-optimizer", "--optimizer.name=lion"],
            "was trained with optimizer.name",
        ),
    ):
        assert main(["train", config, "--run", run, *words]) == 2, words
        assert message in capsys.readouterr().err
        assert not Path(run).exists(), words
    assert main(["train", config, "--from", str(trained / "run")]) == 2
    assert "is this run itself" in capsys.readouterr().err
