"""The schedule of a pipeline as inspect shows it: stages on nodes, numbers, plots, refusals."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.config import ConfigError, load_config
from jaxtrain.inspect import ScheduleInspection, inspect_schedule


def shown(name: str, *overrides: str) -> ScheduleInspection:
    return inspect_schedule(load_config(name, overrides))


def test_configuration_b_is_placed_on_the_nodes_of_the_requirements() -> None:
    """Section 5: layers 1-8 on N0/N4, 9-16 on N1/N5, 17-24 on N2/N6, 25-32 on N3/N7; global batch 128 of 32."""
    plan = shown("llama3_8b_pipe")
    stages = {tuple(plan.nodes(s)): [run[0] + 1 for run in plan.layers(s)] for s in range(4)}
    assert stages == {(0, 4): [1], (1, 5): [9], (2, 6): [17], (3, 7): [25]}
    assert all(len(run) == 8 for s in range(4) for run in plan.layers(s))
    sizes = plan.inspection.topology.sizes
    assert (sizes["tensor"], sizes["pipe"], sizes["data"]) == (8, 4, 2)
    assert plan.inspection.topology.crossings()["tensor"] == 1
    assert (plan.batch_shape.microbatch, plan.batch_shape.accumulation, plan.batch_shape.global_batch) == (
        2,
        32,
        128,
    )
    assert plan.schedule.bubble() == pytest.approx(3 / 35)
    eight = shown("llama3_8b_pipe", "train.accumulation=8", "train.global_batch=32")
    assert eight.schedule.bubble() == pytest.approx(3 / 11)


def test_bytes_of_slots() -> None:
    """70B, 8192 tokens, sequence parallelism over 8: 8192 x 8192 x 2 B / 8 is 16 MiB, 20 layers of each."""
    plan = shown("llama3_70b_pipe", "pipeline.schedule=1f1b")
    assert plan.slot_bytes["input"] == 16 * 2**20
    assert plan.slot_bytes["kept"] == 20 * 16 * 2**20
    chunks = shown("llama3_70b_pipe")
    assert (chunks.slot_bytes["kept"], chunks.slots["kept"]) == (10 * 16 * 2**20, 11)
    assert shown("llama3_70b_pipe", "remat.every=5").slot_bytes["kept"] == 2 * 16 * 2**20
    assert shown("llama3_70b_pipe", "rules.preset=[zero1, tensor]").slot_bytes["input"] == 128 * 2**20
    assert plan.slots == {"input": 1, "kept": 7, "cotangent": 1, "stored": 0}


def test_layers_of_chunks_and_uneven_stages() -> None:
    interleaved = shown("llama3_8b_pipe", "pipeline.schedule=interleaved")
    assert [run[0] for run in interleaved.layers(1)] == [4, 20]
    uneven = shown("llama3_8b_pipe", "pipeline.stages=[9, 8, 8, 7]")
    assert [len(uneven.layers(s)[0]) for s in range(4)] == [9, 8, 8, 7]


def test_the_schedule_as_text_is_the_table_of_the_requirements() -> None:
    plan = shown(
        "llama3_8b_pipe", "mesh.pipe=2", "mesh.data=4", "pipeline.microbatches=3", "train.accumulation=3",
        "train.global_batch=24",
    )  # fmt: skip
    console = Console(width=200, file=io.StringIO())
    plan.print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.split() for line in text.splitlines() if re.match(r"stage \d", line)]
    # A backward of inputs and weights is drawn over two slots.
    assert lines[0][2:] == ["F0", "F1", "·", "·", "B0", "-", "F2", "B1", "-", "·", "B2", "-"]
    assert lines[1][2:] == ["·", "F0", "B0", "-", "F1", "B1", "-", "F2", "B2", "-", "·", "·"]
    assert "bubble: 25.0% by (P-1)/(vM+P-1), 25.0% of the executor's ticks" in text


def test_a_narrow_console_folds_the_schedule() -> None:
    console = Console(width=60, file=io.StringIO())
    shown("llama3_8b_pipe").print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 60
    assert all(f"B{m}" in text for m in range(32))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_svg_holds_every_piece_of_work_twice(schedule: str) -> None:
    plan = shown("llama3_8b_pipe", f"pipeline.schedule={schedule}", "train.accumulation=8", "train.global_batch=32")
    root = ElementTree.fromstring(plan.svg())
    assert root.tag.endswith("svg") and plan._repr_svg_() == plan.svg()
    P, v, M = plan.schedule.shape
    boxes = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(boxes) == 2 * P * v * M * (3 if plan.schedule.split else 2)


def test_the_verb_writes_svg_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.svg"
    arguments = ["inspect", "llama3_8b_pipe", "--schedule", "--schedule-svg", str(path), "--json"]
    assert main([*arguments, "--pipeline.schedule", "zero_bubble"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["phases"][0] == {"kinds": "F", "start": 0, "stop": 3}
    assert result["ticks"] == len(result["table"]) == 38
    assert result["table"][6][0] == "F6 B0 W0"
    assert result["nodes"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert result["bubble"]["classic"] < result["bubble"]["formula"]
    ElementTree.fromstring(path.read_text())
    assert main(["inspect", "llama3_8b_pipe", "--schedule"]) == 0
    assert "Stages" in capsys.readouterr().out


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"mesh.pipe is 1"):
        shown("llama3_8b")
    with pytest.raises(ConfigError, match=r"pipeline.schedule 'gpip' is unknown \(did you mean gpipe\?\)"):
        shown("llama3_8b_pipe", "pipeline.schedule=gpip")
    with pytest.raises(ConfigError, match=r"pipeline.stages .* sum to 30"):
        shown("llama3_8b_pipe", "pipeline.stages=[9, 8, 8, 5]")
    with pytest.raises(ConfigError, match=r"pipeline.microbatches 8 is not train.accumulation 32"):
        shown("llama3_8b_pipe", "pipeline.microbatches=8")
