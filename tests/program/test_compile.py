"""Compiling the real step for devices that are not there: figures against hand counts, and every planted fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from rich.console import Console

import jaxtrain
from jaxtrain.cli import main
from jaxtrain.config import ConfigError, RunConfig, dump_config, load_config, named_cluster, replace, validate
from jaxtrain.observe.flops import training_flops
from jaxtrain.program import compile as plan
from jaxtrain.program.compile import compile_for, make_request, run_worker
from jaxtrain.program.report import ProgramReport
from jaxtrain.report.compiled import compiled_diff_rows, print_compiled, proof_lines
from jaxtrain.report.page import page

LAYERS, D, F, V, L, SEQUENCES = 3, 256, 1024, 1024, 256, 64
BASE = validate(
    {
        "model": {"vocab_size": V, "d_model": D, "n_layers": LAYERS, "n_heads": 8, "d_ff": F, "max_seq_len": L},
        "data": {"seq_len": L, "tokenizer": {"vocab_size": V}},
        "train": {"global_batch": SEQUENCES},
        "precision": {"compute": "bfloat16"},
        "remat": {"policy": "full"},
        "mesh": {"data": 8, "tensor": 8},
        "rules": {"preset": ["fsdp", "tensor_sequence"], "replicated_limit": 10**9},
        "attention": {"backend": "dense"},  # the FLOPs of a kernel are not in the program
    }
)
SMALL = replace(BASE, "model.n_layers=1", "mesh.data=16", "mesh.tensor=1", "remat.policy=none")


@cache
def small(*overrides: str, target: Literal["cuda", "cpu"] = "cuda") -> ProgramReport:
    return compile_for(replace(SMALL, *overrides), "h100_8x8", 16, target)


def accumulated(preset: str, microbatches: int, target: Literal["cuda", "cpu"]) -> ProgramReport:
    overrides = f"rules.preset=[{preset}]", f"train.accumulation={microbatches}", "train.global_batch=128"
    return small(*overrides, target=target)


def strays() -> list[str]:
    """Workers that a test has left behind."""
    found = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if "jaxtrain.program.worker" in line and line.split()[0] in ("1", str(os.getpid()))]


@pytest.fixture(scope="module")
def report() -> ProgramReport:
    extra = "guard.replay_every=10", "checkpoint.local={directory: /local/ckpt, peers: 2}"
    return jaxtrain.compile_for(replace(BASE, *extra), "h100_8x8")


# ---- what is reported


def test_flops_are_those_of_a_hand_count(report: ProgramReport) -> None:
    """Full remat: forward, forward again without its last output, and backward (two products each)."""
    positions = SEQUENCES * L / 64
    attention, up, down = 4 * D * D, 2 * D * F, F * D
    scores = 2 * L * D  # both products, a multiply and an add being counted below
    layer = 4 * (attention + up + scores) + 3 * down
    hand = 2 * positions * (LAYERS * layer + 3 * D * V)
    assert report.flops.executed == pytest.approx(hand, rel=0.01)
    assert report.flops.full == pytest.approx(training_flops(BASE.model, L).full * positions)
    assert report.flops.recompute == pytest.approx(1 - report.flops.full / hand, abs=0.01)
    assert report.flops.opaque == ()


def test_memory_is_the_state_and_temporaries(report: ProgramReport) -> None:
    memory = report.memory
    # Master and two moments in float32, each over all 64 devices; norms are sharded over data alone.
    whole = 3 * 4 * report.parameters / 64
    assert whole < memory.arguments < 1.2 * whole + 4 * 4 * SEQUENCES * L / 8
    assert memory.arguments < memory.peak < memory.arguments + memory.temporaries + 2**20
    assert memory.card == 80e9 and memory.fits and memory.host == 0
    # Between steps there is the state alone; a replay holds its results beside it.
    assert whole <= memory.save < 1.2 * whole
    assert memory.replay == memory.needed == memory.peak + memory.aliased and memory.aliased > whole
    assert memory.spare == 80e9 - memory.needed
    sizes = [one.bytes for one in memory.largest]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= memory.live
    # Two answers of the compiler: live ranges added up, and what it allocates.
    assert memory.live == pytest.approx(memory.peak, rel=0.01)
    assert any("jaxtrain/ops/" in one.source for one in memory.largest)
    # Each of the 8 nodes has an eighth of the state, and that of two others; what is on all devices needs no copy.
    tier = report.local_tier
    assert tier is not None and tier["own"] == pytest.approx(8 * memory.save, rel=0.01)
    assert tier["copies"] == pytest.approx(2 * tier["own"], rel=0.01) and tier["sent"] == 8 * tier["copies"]


def test_tensor_groups_are_inside_nodes_and_data_groups_are_not(report: ProgramReport) -> None:
    assert report.proof.holds and proof_lines(report)[0] == "tensor and expert groups inside a domain: yes"
    for one in report.collectives:
        for group in one.groups if one.axes == ("tensor",) else ():
            assert len({member // 8 for member in group}) == 1 and one.link == "fast"
        if one.axes == ("data",):
            assert one.link == "network" and one.domains == 8
    assert {"tensor", "data"} <= {row.axes for row in report.traffic}
    assert (report.nodes == np.arange(64).reshape(8, 1, 8, 1, 1) // 8).all()


def test_fsdp_gathers_weights_and_scatters_gradients(report: ProgramReport) -> None:
    # Payload of a reduce-scatter is what it reduces: all weights of a tensor shard, in float32 from each layer. What is
    # gathered is in bfloat16.
    layers = 2 * LAYERS * (4 * D * D + 3 * D * F) / 8
    of_data = [one for one in report.collectives if one.axes == ("data",) and one.elements > 64]
    dtypes = {(one.kind, dtype) for one in of_data for dtype in one.dtypes}
    assert dtypes == {("reduce-scatter", "f32"), ("all-gather", "bf16")}
    scattered = sum(row.payload for row in report.traffic if (row.axes, row.kind) == ("data", "reduce-scatter"))
    gathered = sum(row.payload for row in report.traffic if (row.axes, row.kind) == ("data", "all-gather"))
    assert 2 * layers <= scattered <= report.reductions.bytes and 2 * layers <= gathered  # forward, and again backward
    assert report.unknown == () and report.rematerializations == ()


@pytest.mark.prove
def test_gradients_travel_in_bfloat16_where_the_setting_says_so() -> None:
    report = small("rules.preset=[fsdp]", "precision.reduce=bfloat16")
    sent = {
        dtype: sum(one.elements for one in report.reductions.found if one.dtypes == (dtype,))
        for dtype in ("bf16", "f32")
    }
    # One layer's matrices and the head; the embedding and the scales of norms are summed in float32 anyway.
    assert sent["bf16"] == 4 * D * D + 3 * D * F + D * V and sent["f32"] == V * D + 3 * D
    assert {one.kind for one in report.reductions.found} == {"reduce-scatter"}


def test_timelines_are_a_forward_and_a_backward_layer(report: ProgramReport) -> None:
    forward, backward = report.timelines
    assert forward.times == backward.times == LAYERS
    assert "forward" in forward.title and "backward" in backward.title
    assert backward.matmul == pytest.approx(3 * forward.matmul, rel=0.1)  # again and back, less the down projection
    for line in report.timelines:
        assert line.matmul <= line.total and {"matmul", "fast", "network"} == {span.lane for span in line.spans}


def test_report_as_json_tables_and_page(report: ProgramReport) -> None:
    tree = json.loads(json.dumps(report.to_json()))
    assert tree["memory"]["fits"] is True and tree["flops"]["ratio"] > 1 and tree["proof"]["holds"] is True
    console = Console(file=StringIO(), width=80)
    print_compiled(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tensor and expert groups inside a domain: yes" in text and "reduce-scatter" in text
    parser = Balanced()
    parser.feed(page(report))
    assert parser.open == [] and parser.seen["svg"] == 4 and not parser.outside


class Balanced(HTMLParser):
    """Counts elements, keeps those that are not closed and references to anything outside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.outside += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---- what a layout does to its gradients


@pytest.mark.parametrize(
    ("preset", "target"),
    [("ddp", "cpu"), ("zero1", "cpu"), ("zero2", "cuda")]
    + [pytest.param(preset, "cuda", marks=pytest.mark.prove) for preset in ("ddp", "zero1")],
)
def test_accumulation_reduces_gradients_no_more_often(preset: str, target: Literal["cuda", "cpu"]) -> None:
    once, eight = (accumulated(preset, n, target) for n in (1, 8))
    assert 1 <= eight.reductions.calls <= once.reductions.calls
    assert eight.reductions.bytes <= once.reductions.bytes
    kinds = {one.kind for one in eight.reductions.found}
    assert "reduce-scatter" in kinds if target == "cuda" and preset != "ddp" else kinds == {"all-reduce"}
    rows = {row[0]: row[1:3] for row in compiled_diff_rows(once, eight)}
    assert rows["gradient reductions"] == [str(once.reductions.calls), str(eight.reductions.calls)]


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.prove)])
def test_a_group_that_spans_domains_is_found_and_named(target: Literal["cuda", "cpu"]) -> None:
    spanning = small(
        "rules.preset=[tensor]", "mesh.data=1", "mesh.tensor=16", "mesh.allow_cross_domain=[tensor]",
        "model.n_heads=16",
        target=target,
    )  # fmt: skip
    assert not spanning.proof.holds
    lines = proof_lines(spanning)
    assert lines[0] == "tensor and expert groups inside a domain: no"
    assert "the first 0-15 in domains 0, 1" in lines[1]


def test_cpu_target_agrees_on_work_and_notes_its_error() -> None:
    gpu, cpu = (accumulated("zero2", 1, target) for target in ("cuda", "cpu"))  # type: ignore[arg-type]
    assert cpu.flops.executed == pytest.approx(gpu.flops.executed, rel=0.02)
    assert not cpu.memory.exact and cpu.memory.arguments == pytest.approx(gpu.memory.arguments, rel=0.01)
    assert 0.5 < cpu.memory.peak / gpu.memory.peak < 2
    assert any("-21% to +38%" in note for note in cpu.notes)


# ---- planted faults: one message, exit status 2, no stray process


def config_file(folder: Path, config: RunConfig) -> str:
    (folder / "run.yaml").write_text(dump_config(config))
    return str(folder / "run.yaml")


def fault(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compile", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxtrain: ") and "Traceback" not in error
    assert strays() == []
    return error


def test_over_memory_is_reported_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [config_file(tmp_path, SMALL), "--cluster", "h100_8x8", "--devices", "16", "--target", "cpu", "--json"]
    assert main(["compile", *arguments, "--cluster.memory_gb", "0.001"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["memory"]["fits"] is False
    assert captured.err.startswith("jaxtrain: does not fit: peak ") and "more than the card's" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "h100_8y8"], "did you mean h100_8x8?"),
        (["--cluster", "h100_8x8", "--cluster.device", "H10O"], "not a known card (did you mean H100?)"),
        (["--cluster", "h100_8x8", "--cluster.target", "/no/such.txt"], "cluster.target /no/such.txt cannot be read"),
        (["--cluster", "h100_8x8", "--devices", "12"], "devices is 12: use a multiple of cluster.devices_per_node 8"),
        (["--cluster", "h100_8x8", "--target", "cdua"], "did you mean cuda?"),
        (["--cluster", "h100_8x8", "--target", "tpu"], "cluster.target is null"),
        ([], "there is no cluster to compile for"),
        (["--cluster", "h100_8x8", "--mesh.tensor", "3"], "does not divide 64 devices"),
        (
            ["--cluster", "h100_8x8", "--xla.xla_gpu_enable_triton_gem", "false"],
            "did you mean xla_gpu_enable_triton_gemm?",
        ),
        (["--cluster", "h100_8x8", "--xla.optimization_level", "O9"], "use O0, O1, O2, O3"),
        (["--cluster", "h100_8x8", "--timeout", "1"], "took longer than 1 seconds"),
    ],
)
def test_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in fault(capsys, config_file(tmp_path, replace(BASE, "mesh.data=-1")), *arguments)


def test_a_value_that_only_the_gpu_compiler_refuses() -> None:
    with pytest.raises(ConfigError, match=r"refused this program: .*nonsense"):
        small("xla.xla_gpu_collective_domain_assignment=nonsense")


def test_a_missing_package_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan, "PLAN_PACKAGES", tmp_path)
    with pytest.raises(ConfigError, match=r"run make setup-plan.* or use --target cpu"):
        small()


def test_tpu_without_libtpu() -> None:
    if find_spec("libtpu") is not None:
        pytest.skip("libtpu is installed")
    cluster = named_cluster("h100_8x8", ["cluster.target=v5e:4x4", "cluster.devices_per_node=4"])
    with pytest.raises(ConfigError, match="needs libtpu, which is not installed"):
        compile_for(SMALL, cluster, 16, "tpu")


def test_two_configurations_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (tmp_path / name for name in ("one.yaml", "two.yaml"))
    one.write_text(dump_config(SMALL))
    two.write_text(dump_config(replace(SMALL, "remat.policy=none", "train.global_batch=32")))
    arguments = ["--cluster", "h100_8x8", "--devices", "16", "--target", "cpu"]
    assert main(["compile", str(one), "--diff", str(two), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "train.global_batch" in printed and "executed TFLOP" in printed and "gradient reductions" in printed


def test_a_compiler_that_aborts_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that XLA does not know ends the process."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    config = replace(SMALL, "mesh.data=64", "rules.preset=[ddp]").model_copy(
        update={"cluster": named_cluster("h100_8x8")}
    )
    request = make_request(config, None, "cuda") | {"folder": str(tmp_path)}
    with pytest.raises(
        ConfigError, match=r"the compiler (ended|was ended) .* for 64 devices \(8x1x8\); its last messages:\n  \S"
    ):
        run_worker(request, 100)
    assert strays() == []


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    request = make_request(load_config("llama3_8b"), None, "cuda") | {"folder": str(tmp_path)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain.program.worker"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.close()
    assert worker.wait(20) == 1 and not (tmp_path / "answer.json").exists()


def test_importing_the_package_loads_no_jax() -> None:
    code = (
        "import sys, jaxtrain; assert 'jax' not in sys.modules; jaxtrain.compile_for; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
