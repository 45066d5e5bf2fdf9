"""Schedules of length and batch: one compilation a phase, exact counts, exact resume at and around a border."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config import ConfigError, RunConfig, dump_config, validate
from jaxtrain.data import IGNORE, open_stream, prepare
from jaxtrain.train.loop import train
from jaxtrain.train.resolve import bind

UPDATES = 8
SCHEDULE = [
    {"start": 0, "seq_len": 16, "global_batch": 16},
    {"start": 3, "seq_len": 32, "global_batch": 8},
    {"start": 6, "seq_len": 24, "global_batch": 24},
]


def config_of(folder: Path, updates: int = UPDATES, **data: Any) -> RunConfig:
    text = folder / "corpus"
    if not text.exists():
        text.mkdir()
        for i in range(40):
            (text / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog {'so ' * i}\n" * 3)
    return validate({
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(text), "include": ["*[02468].txt"], "weight": 3}, {"text": str(text)}],
            "tokenizer": {"vocab_size": 300}, "seq_len": 32, "held_out": 0.2, "schedule": SCHEDULE,
            "cache": str(folder / "cache"), **data,
        },
        "train": {"steps": updates, "global_batch": 8, "sample_prompt": ""},
        "optimizer": {"schedule": "constant"},
        "eval": {"every": 4, "batches": 1},
        "checkpoint": {"every": 1, "asynchronous": False},
    })  # fmt: skip


def rows(run: Path) -> list[dict[str, Any]]:
    keep = ("step", "loss", "grad_norm", "scored_tokens", "tokens_total", "eval_loss")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: row[key] for key in keep if key in row} for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedule")


@pytest.fixture(scope="module")
def unbroken(place: Path) -> tuple[dict[str, Any], list[str]]:
    """Summary and compilations of the run that the others are compared with."""
    compiled: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            result = train(config_of(place), place / "unbroken", quiet=True)
    finally:
        logger.removeHandler(handler)
    return result, [message for message in compiled if message.startswith("Finished XLA compilation")]


def test_a_scheduled_run_compiles_once_a_phase_and_counts_every_token(
    place: Path, unbroken: tuple[dict[str, Any], list[str]]
) -> None:
    config = config_of(place)
    result, compiled = unbroken
    assert sum("jit(train_step)" in message for message in compiled) == len(SCHEDULE), compiled
    stream = open_stream(prepare(config).train, config)
    batches = [next(stream) for _ in range(UPDATES)]
    assert [batch["tokens"].shape for batch in batches] == [(16, 16)] * 3 + [(8, 32)] * 3 + [(24, 24)] * 2
    scored = [int((batch["labels"] != IGNORE).sum()) for batch in batches]
    got = rows(place / "unbroken")
    assert [row["scored_tokens"] for row in got] == scored
    assert [row["tokens_total"] for row in got] == np.cumsum(scored).tolist()
    assert result["tokens_total"] == sum(source["tokens"] for source in result["sources"]) == sum(scored)
    assert result["sources"][0]["share"] == pytest.approx(0.75, abs=0.1)
    assert [(phase["start"], phase["seq_len"], phase["global_batch"]) for phase in result["phases"]] == [
        tuple(entry.values()) for entry in SCHEDULE
    ]
    stream.close()


def test_stopped_before_at_and_after_a_border_it_goes_on_as_unbroken(place: Path, unbroken: Any) -> None:
    for updates in (2, 3, 4, UPDATES):
        train(config_of(place, updates), place / "stopped", quiet=True)
    got, want = rows(place / "stopped"), rows(place / "unbroken")
    # An evaluation also follows the last update of each start.
    for row, other in zip(got, want, strict=True):
        assert {**row, "eval_loss": None} == {**other, "eval_loss": None}


def test_two_processes_cross_a_border_as_one(place: Path, unbroken: Any) -> None:
    (place / "run.yaml").write_text(dump_config(config_of(place, updates=5)))
    command = [sys.executable, "-m", "jaxtrain", "launch", str(place / "run.yaml"), "--run", str(place / "two"),
               "--processes", "2", "--devices-per-process", "1",
               "--checkpoint.every", "8", "--eval.every", "null"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    for got, want in zip(rows(place / "two"), rows(place / "unbroken")[:5], strict=True):
        assert got["scored_tokens"] == want["scored_tokens"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    summary = json.loads((place / "two" / "summary.json").read_text())
    assert sum(source["tokens"] for source in summary["sources"]) == summary["tokens_total"]


def test_a_phase_that_does_not_fit_the_mesh_names_the_schedule(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.schedule: global_batch 12 does not divide into 8 replicas"):
        bind(config_of(place, schedule=[{"start": 0}, {"start": 2, "global_batch": 12}]))
