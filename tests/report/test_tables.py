"""Tables at 80 and 120 columns without a terminal: nothing is cut, and nothing is missing."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxtrain.config import load_config, to_tree
from jaxtrain.inspect import inspect, inspect_schedule
from jaxtrain.program.collectives import DomainProof, Reductions
from jaxtrain.program.report import FlopsReport, LiveBuffer, MemoryReport, ProgramReport, Traffic
from jaxtrain.report.compiled import fit_line, print_compiled, print_compiled_diff, tensor_groups
from jaxtrain.report.page import mesh_svg
from jaxtrain.report.tables import FittedTable, format_range, gib, short_names, wrap_cell
from jaxtrain.report.training import print_summary

WIDE = 4000
PATHS = ("/a/path/that/is/long/one.yaml", "/a/path/that/is/long/two.yaml")
Draw = Callable[[Console], None]


def rendered(draw: Draw, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    draw(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def words(text: str) -> Counter[str]:
    """Words and numbers, split where a table may break them."""
    return Counter(re.findall(r"[A-Za-z0-9.%:]+", text))


def program_report(global_batch: int = 64, sizes: tuple[int, int] = (8, 8)) -> ProgramReport:
    config = to_tree(load_config("llama3_8b", [f"train.global_batch={global_batch}"]))
    shape = (sizes[0], 1, sizes[1], 1, 1)
    nodes = np.arange(64).reshape(shape) // 8
    names = ("rematted_computation/transpose(jvp(bhlm,bhmv->bhlv))/dot_general", "jit(dynamic_update_index_in_dim)/set")
    largest = tuple(
        LiveBuffer(f"fusion.{i}", 10**9 + i * 10**8, f"bf16[{i},8192,4096]", name, f"jaxtrain/ops/attention.py:{i}")
        for i, name in enumerate(names)
    )
    traffic = tuple(
        Traffic(axes, kind, link, True, 130 + i, 10**10 + i, 2 * 10**10, 0.1234, 0.87,
                tuple(map(tuple, np.arange(64).reshape(8, 8).tolist())), ("jaxtrain/nn/layers.py:87",))
        for i, (axes, kind, link) in enumerate(
            (("tensor", "reduce-scatter", "fast"), ("data", "all-gather", "network"), ("data x expert", "all-to-all",
             "network"), ("data x tensor", "collective-permute", "network")))
    )  # fmt: skip
    return ProgramReport(
        config=config, cluster="h100_8x8", card="H100", target="cuda", devices=64,
        sizes=dict(zip(("data", "pipe", "tensor", "seq", "expert"), shape, strict=True)), domain=nodes, nodes=nodes,
        accumulation=global_batch // 8, microbatch=1, parameters=8_030_261_248,
        memory=MemoryReport(60 * 2**30, 80 * 10**9, 0, 2**34, 2**34, 2**34, 2**33, True, 59 * 2**30, largest,
                            50 * 2**30, 75 * 2**30),
        flops=FlopsReport(10**15, 9e14, 9.5e14, 1e13, {}, (("cudnn$fmhaSoftmax", 64),)), traffic=traffic,
        collectives=(), reductions=Reductions(3, 10**9, ()), coverage={"fast": 0.5, "network": 0.25},
        inserted_resharding=(), rematerializations=(), proof=DomainProof(True, (), ()), timelines=(), trace_seconds=1.5,
        compile_seconds=20.25, options={"xla_gpu_enable_latency_hiding_scheduler": True}, version="0.12",
        notes=("attention: tokamax [tensor, data]",), unknown=(),
        local_tier={"own": 2**30, "copies": 2**30, "sent": 2**33, "keep": 2},
    )  # fmt: skip


def summary() -> dict[str, Any]:
    return {"steps": 400, "loss_first": 8.31, "loss_last": 2.5, "picture": "/a/very/long" * 12 + "/loss.png"}


def tables() -> dict[str, Draw]:
    eight = load_config("models/llama3_8b", ["mesh.tensor=8", "mesh.pipe=4", "rules.preset=[tensor, zero1]"])
    mixture = load_config("deepseek_v3", [])
    one = inspect(eight, cluster="h100_8x8")
    schedule = inspect_schedule(load_config("llama3_8b_pipe"))
    report = program_report()
    return {
        "inspect": one.print,
        "mixture": inspect(mixture).print,
        "diff": one.diff("rules.mlp=null", "rules.optimizer=null", "precision.compute=float16").print,
        "no difference": one.diff("train.seed=1").print,
        "stages": lambda console: [console.print(t) for t in schedule_tables(schedule)] and None,
        "compile": lambda console: print_compiled(report, console),
        "compile diff": lambda console: print_compiled_diff(report, program_report(128), PATHS, console),
        "summary": lambda console: print_summary(Path("runs/x"), summary(), console),
    }


def schedule_tables(schedule: Any) -> list[FittedTable]:
    from jaxtrain.report.schedule import _memory_table, _stage_table

    return [_stage_table(schedule), _memory_table(schedule)]


@pytest.fixture(scope="module")
def drawn() -> dict[str, Draw]:
    return tables()


@pytest.mark.parametrize("width", [80, 120])
def test_no_table_loses_anything(drawn: dict[str, Draw], width: int) -> None:
    for name, draw in drawn.items():
        wide, narrow = rendered(draw, WIDE), rendered(draw, width)
        assert "…" not in narrow and "\x1b" not in narrow, name
        assert max(len(line.rstrip()) for line in narrow.splitlines()) <= width, name
        assert words(narrow) == words(wide), name


def test_parameters_are_named_in_full_on_one_line() -> None:
    one = inspect(load_config("deepseek_v3", []))
    lines = rendered(one.print, 80).splitlines()
    for row in one.parameters:
        assert sum(line.split(" ")[0] == row["path"] for line in lines) == 1


def test_a_narrow_table_becomes_records() -> None:
    table = FittedTable(["parameter", "size", "bytes"], [["layers/mlp/up/weight", "117440512", "234881024"]])
    text = rendered(lambda console: console.print(table), 20)
    assert " ".join(text.split()) == "parameter: layers/ mlp/up/weight size: 117440512 bytes: 234881024"


def test_wrapping_breaks_after_separators_and_keeps_numbers_whole() -> None:
    assert wrap_cell("layers/attention/query/weight", 18) == ["layers/attention/", " query/weight"]
    assert wrap_cell("16.06 GB (16,060,522,496)", 17) == ["16.06 GB", " (16,060,522,496)"]
    assert wrap_cell("  x: all-reduce", 9) == ["  x: all-", "   reduce"]
    assert wrap_cell("abcdefgh", 3) == ["abc", " de", " fg", " h"]
    assert wrap_cell("", 5) == [""] and wrap_cell("a\n\nb", 5) == ["a", "", "b"]


def test_numbers_as_text() -> None:
    assert [gib(n * 2**30) for n in (0, 1e-4, 0.005, 0.25, 70)] == ["0.00", "0.0001", "0.005", "0.25", "70.00"]
    shown = [format_range(numbers) for numbers in ([3], [0, 4], [0, 1, 2], [0, 8, 16], [0, 1, 8, 9])]
    assert shown == ["3", "0, 4", "0-2", "0-16/8", "0, 1, 8, 9"]


def test_names_are_shortened_from_the_left() -> None:
    assert short_names(PATHS) == [".../one.yaml", ".../two.yaml"]
    assert short_names(["a/x.yaml", "b/x.yaml"]) == ["a/x.yaml", "b/x.yaml"]
    assert short_names(["gpt2", "gpt2"]) == ["gpt2", "gpt2"]
    text = rendered(lambda console: print_compiled_diff(program_report(), program_report(128), PATHS, console), 80)
    assert re.search(r"\ntrain.global_batch +64 +128\n", text) and all(path in text for path in PATHS)


def test_a_peak_names_its_microbatch() -> None:
    assert "microbatch 1 x accumulation 8" in fit_line(program_report())
    assert "microbatch 1 x accumulation 16" in fit_line(program_report(128))


def test_the_page_tells_64_groups_apart() -> None:
    report = program_report(sizes=(64, 1))
    assert np.unique(tensor_groups(report)).size == 64
    svg = mesh_svg(report)
    squares = re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="16.0"[^>]*fill="([^"]+)"[^>]*><title>g(\d+) ', svg)
    fills: dict[str, tuple[str, ...]] = {}
    for fill, group in squares:
        fills[group] = (*fills.get(group, ()), fill)
    assert len(fills) == len(set(fills.values())) == 64
    assert all(svg.count(f">g{group}<") == 1 for group in range(64))


@pytest.mark.parametrize(
    ("base", "override", "reason"),
    [
        ([], "rules.mlp=tensor", "mesh.tensor has size 1: the rule has no effect; try mesh.data=-1 mesh.tensor=8"),
        ([], "train.seed=1", "train.seed does not affect how parameters are sharded"),
        (
            ["mesh.tensor=8", "mesh.data=-1"],
            "rules.residual_seq=tensor",
            "rules.residual_seq shards activations: no parameter changes",
        ),
        ([], "rules.embed=data", "rules.embed: embed is data before and after"),
    ],
)
def test_a_difference_without_effect_says_why(base: list[str], override: str, reason: str) -> None:
    difference = inspect(load_config("llama3_8b", base), cluster="h100_8x8").diff(override)
    assert difference.reasons == [reason]
    assert reason in " ".join(rendered(difference.print, 80).split())


def test_the_suggested_size_makes_the_rule_act() -> None:
    before = inspect(load_config("llama3_8b"), cluster="h100_8x8")
    assert before.diff("rules.mlp=tensor", "mesh.data=-1", "mesh.tensor=8").reasons == []
