"""Bad numbers: overflows and spikes are skipped or rolled back, and a diverged run never ends as a success."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import CheckpointReader, Checkpoints
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import DivergedError, GuardConfig, RunConfig, replace, validate
from jaxtrain.data import prepare
from jaxtrain.hub.runs import export_run
from jaxtrain.observe.events import read_events
from jaxtrain.train.guard import is_spike, new_history, next_history
from jaxtrain.train.loop import train
from jaxtrain.train.losses import LOSSES, HeadInputs, cross_entropy_loss
from jaxtrain.train.resolve import bind
from jaxtrain.train.run import Run

MARK = "~"
MARK_ID: list[int] = []
FACTOR = 50.0


@LOSSES.register("poisoned")
def poisoned(inputs: HeadInputs) -> Any:
    """Cross entropy, FACTOR times as large for a batch that holds the token of MARK."""
    loss, sums = cross_entropy_loss(inputs)
    factor = jnp.where(jnp.any(inputs.batch["tokens"] == MARK_ID[0]), FACTOR, 1.0)
    return loss * factor, {**sums, "loss": sums["loss"] * factor}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("guard")
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)
    (folder / "corpus" / "poison.txt").write_text(MARK)
    config = validate({
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(folder / "corpus")}], "tokenizer": {"vocab_size": 260}, "seq_len": 32,
            "cache": str(folder / "cache"),
        },
        "train": {"steps": 22, "global_batch": 8, "seed": 1, "sample_prompt": "", "loss": "poisoned"},
        "optimizer": {"schedule": "constant"},
        "eval": {"every": None},
        "checkpoint": {"every": 4, "keep": 9},
        "observe": {"tensorboard": False},
        "guard": {"spike": 10, "window": 8},
    })  # fmt: skip
    encode = prepare(config).tokenizer.encode
    MARK_ID[:] = set(encode(MARK)) - set(encode("the quick brown fox jumps over the lazy dog 0123456789\n"))
    return config


def rows_of(run: Path) -> list[tuple[float, ...]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens_total"], row["skipped_total"]) for row in rows]


def events_of(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] in kinds]


class StopAt:
    def __init__(self, step: int) -> None:
        self.at = step

    def due(self, run: Run) -> bool:
        return run.step == self.at

    def __call__(self, run: Run) -> None:
        run.stop("asked")


class Damage:
    """Alters the newest checkpoint before a step that is a spike, and sees what is left after the rollback."""

    def __init__(self, step: int) -> None:
        self.at, self.left = step, list[str]()

    def due(self, run: Run) -> bool:
        return run.step in (self.at, self.at + 1)

    def __call__(self, run: Run) -> None:
        folder = run.directory / "checkpoints"
        if run.step > self.at:
            self.left = sorted(path.name for path in folder.iterdir())
            return
        run.wait_for_checkpoints()
        newest = max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
        record = newest / "record" / "metadata"
        record.write_bytes(record.read_bytes()[:-9] + b"altered!}")


class Poison:
    """Makes one parameter NaN after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def due(self, run: Run) -> bool:
        return run.step == self.at

    def __call__(self, run: Run) -> None:
        embed = run.state["params"]["embed"]
        embed["tokens"] = embed["tokens"].at[0, 0].set(jnp.nan)


def test_the_rule_compares_with_the_median_of_a_full_history() -> None:
    config = GuardConfig(spike=5, window=8)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    (history,) = new_history(config, mesh, {}).values()
    for value in (1.0, 1.2, 0.8, 1.0, 1.1, 0.9, 1.0):
        assert not is_spike(config, history, jnp.float32(9.0), jnp.float32(1.0)), "the history is not full"
        history = next_history(history, jnp.float32(value), jnp.float32(1.0), jnp.bool_(True))
    history = next_history(history, jnp.float32(1.0), jnp.float32(1.0), jnp.bool_(True))
    # Median 1, deviations 0, 0, 0, 0, .1, .1, .2, .2: their median is 0.05.
    for loss, norm, spike in ((1.24, 1.0, False), (1.26, 1.0, True), (1.0, 1.04, False), (1.0, 1.06, True)):
        assert bool(is_spike(config, history, jnp.float32(loss), jnp.float32(norm))) == spike
    same = next_history(history, jnp.float32(9), jnp.float32(9), jnp.bool_(False))
    assert all((same[name] == history[name]).all() for name in history)


def test_a_spike_is_skipped_and_a_resumed_run_skips_the_same(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, tmp_path / "unbroken")
    spikes = events_of(tmp_path / "unbroken", "spike")
    assert spikes and "are a spike" in spikes[0]["why"]
    at = spikes[0]["step"]
    assert 9 <= at < 21, "the batch with the mark must come after a full history"
    assert f"step {at} skipped: loss" in capsys.readouterr().out
    rows = rows_of(tmp_path / "unbroken")
    assert rows[at - 1][3] == rows[at - 2][3], "its tokens do not count"
    assert rows[at][1] < 10, "the next step is a normal one"
    train(config, tmp_path / "run", quiet=True, hooks=[StopAt(at - 1)])
    train(config, tmp_path / "run", quiet=True)
    assert rows_of(tmp_path / "run") == rows

    back = replace(config, "guard.action=rollback")
    train(back, tmp_path / "back")
    (rollback,) = events_of(tmp_path / "back", "rollback")
    to = (at - 1) // 4 * 4
    assert (rollback["step"], rollback["to"]) == (at, to)
    printed = capsys.readouterr().out
    assert f"the state is that of step {to} again, the batches of steps {to + 1} to {at} are not read again" in printed
    again = rows_of(tmp_path / "back")
    assert again[: at - 1] == rows[: at - 1] and len(again) == 22
    assert again[at][3] - rows[to - 1][3] == rows[at][3] - rows[at - 1][3], "counted from the checkpoint on"
    assert again[-1][3] < rows[-1][3], "the steps since the checkpoint are lost"
    train(back, tmp_path / "resumed", quiet=True, hooks=[StopAt(at + 1)])
    train(back, tmp_path / "resumed", quiet=True)
    assert rows_of(tmp_path / "resumed") == again

    # After a rollback beyond a checkpoint, a crash must not resume from it: its steps are another history.
    damage = Damage(at)
    train(replace(back, f"train.steps={at + 1}"), tmp_path / "beyond", quiet=True, hooks=[damage])
    (rollback,) = events_of(tmp_path / "beyond", "rollback")
    assert rollback["to"] == to - 4 and f"damaged-{to}-0" in damage.left
    assert max(int(name) for name in damage.left if name.isdecimal()) == to - 4


def test_an_overflow_of_the_update_is_not_applied_and_the_run_ends_with_status_3(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Finite as a setting, infinite as float32.
    wild = replace(config, "optimizer.learning_rate=1e39", "train.steps=4", "checkpoint.every=1")
    with pytest.raises(DivergedError, match="4 steps in a row up to step 4 skipped") as caught:
        train(wild, tmp_path / "run")
    assert caught.value.status == 3 and "no step before is saved: start a new run with --opt" in str(caught.value)
    assert "step 1 skipped: the new parameters or moments were not finite" in capsys.readouterr().out
    assert not (tmp_path / "run" / "summary.json").exists()
    assert events_of(tmp_path / "run", "end")[0]["status"] == 3

    # float16 whose first loss scale is too high says so; no checkpoint that was saved meanwhile counts as good.
    half = [
        "precision.compute=float16",
        "precision.scale_init=1073741824",
        "precision.scale_max=1073741824",
        "precision.max_skipped=3",
    ]
    with pytest.raises(DivergedError, match=r"began at precision.scale_init 1.07374e\+09.*is still 2.68435e\+08"):
        train(replace(config, *half, "checkpoint.every=2"), tmp_path / "half", quiet=True)
    reader = CheckpointReader(tmp_path / "half" / "checkpoints")
    assert reader.read_meta(2)["good"] is False

    # NaN in memory, as after a flipped bit: nothing is applied to it and nothing of it is saved.
    with pytest.raises(DivergedError, match="the state after step 4 is not finite and is not saved"):
        train(config, tmp_path / "nan", quiet=True, hooks=[Poison(3)])
    assert not list((tmp_path / "nan" / "checkpoints").iterdir())


def test_weights_that_are_not_finite_are_not_exported(config: RunConfig, tmp_path: Path) -> None:
    short = replace(config, "train.steps=2", "train.loss=cross_entropy")
    train(short, tmp_path / "run", quiet=True)
    assert export_run(tmp_path / "run", tmp_path / "good")["update"] == 2
    # Written past the checks of the loop, as by an older version.
    folder, order = tmp_path / "run" / "checkpoints", CheckpointOrder(bind(short))
    found = CheckpointReader(folder).restore(order.checkpoint_layout)
    assert found is not None
    embed = found.state["params"]["embed"]
    embed["tokens"] = embed["tokens"].at[0, 0].set(jnp.inf)
    with contextlib.closing(Checkpoints(folder, short.checkpoint)) as checkpoints:
        checkpoints.save(3, found.state, found.data, found.meta)
    with pytest.raises(DivergedError, match=r"weights of step 3 of .* are not finite \(embed/tokens\)"):
        export_run(tmp_path / "run", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
