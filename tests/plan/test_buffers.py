"""The live set at the peak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from texts import llama, module, stored

from jaxtrain.plan.buffers import Buffer, read_peak
from jaxtrain.plan.hlo import read_program

LOOP = """%body (t: (s32[], f32[100], f32[50])) -> (s32[], f32[100], f32[50]) {
  %t = (s32[], f32[100], f32[50]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[100] get-tuple-element(%t), index=1
  %k = f32[50] get-tuple-element(%t), index=2
  %new = f32[100] negate(%v), metadata={op_name="jit(f)/neg" source_file="f.py" source_line=3}
  ROOT %o = (s32[], f32[100], f32[50]) tuple(%i, %new, %k)
}
%test (t2: (s32[], f32[100], f32[50])) -> pred[] {
  %t2 = (s32[], f32[100], f32[50]) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""
ENTRY = """
    %a = f32[100] parameter(0), metadata={op_name="state['w']"}
    %kept = f32[50] constant({...}), metadata={op_name="jit(f)/k" source_file="f.py" source_line=9}
    %zero = s32[] constant(0)
    %in = (s32[], f32[100], f32[50]) tuple(%zero, %a, %kept)
    %loop = (s32[], f32[100], f32[50]) while(%in), condition=%test, body=%body
    %start = ((f32[100]), f32[400]) all-gather-start(%a), replica_groups={{0,1,2,3}}, dimensions={0},
        metadata={op_name="jit(f)/w" source_file="f.py" source_line=5}
    ROOT %done = f32[400] all-gather-done(%start)
""".replace(",\n        ", ", ")
REPORT = """HloLiveRange (max 9):
  InstructionSequence:
    0:a
    1:all-gather.7
    2:start
    3:done
  Live ranges at 3 (peak):
    all-gather.7{}: 1600 bytes (cumulative: 1600 bytes)
    a{}: 400 bytes (cumulative: 2000 bytes)
    loop{1}: 400 bytes (cumulative: 2400 bytes)
    t{2}: 200 bytes (cumulative: 2600 bytes)
    lost{}: 8 bytes (cumulative: 2608 bytes)
  Stack trace breakdown for peak usage: 2 608 bytes
    main (100.0%)
"""


def test_each_buffer_is_led_back_to_what_made_it() -> None:
    peak = read_peak(REPORT, read_program(module(ENTRY, LOOP)))
    assert peak.bytes == 2608
    assert peak.buffers == (
        Buffer("all-gather.7", 1600, "f32[400]", "jit(f)/w", ("f.py:5",), "start"),
        Buffer("a", 400, "f32[100]", "state['w']", (), "a"),
        Buffer("loop{1}", 400, "f32[100]", "jit(f)/neg", ("f.py:3",), "new"),
        Buffer("t{2}", 200, "f32[50]", "jit(f)/k", ("f.py:9",), "kept"),
        Buffer("lost", 8, "", "", (), ""),
    )


def test_another_file_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a live-range report"):
        read_peak("BufferAssignment:", read_program(module("ROOT %a = f32[4] parameter(0)")))


def test_the_8b_step_at_its_peak() -> None:
    """The compiler's own peak of this program was 10,020,110,305 bytes; the live set leaves out only paddings."""
    peak = read_peak(stored("llama3_8b_h100_fsdp8_tensor8.live-range.txt.gz"), llama())
    assert peak.bytes == 10_020_109_420
    assert sum(buffer.bytes for buffer in peak.buffers) == peak.bytes
    sizes = [buffer.bytes for buffer in peak.buffers]
    assert sizes == sorted(sizes, reverse=True)
    # Scores of 8 rows and 4 heads in float32, twice; then the inputs of 32 layers, cut along the sequence.
    first, second, _, inputs = peak.buffers[:4]
    assert first.bytes == second.bytes == 4 * 8 * 4 * 4096 * 4096
    assert (first.source, second.source) == ("jaxtrain/ops/attention.py:38", "jaxtrain/ops/attention.py:33")
    assert (inputs.shape, inputs.source) == ("bf16[32,8,512,4096]", "jaxtrain/nn/stack.py:35")
    assert all(buffer.op_name or buffer.source for buffer in peak.buffers if buffer.bytes > 2**26)


def test_the_report_of_this_version_is_read(tmp_path: Path) -> None:
    """On CPU, from a process of its own: an argument, two products and the result are 4 MB each."""
    script = """if True:
        import jax, jax.numpy as jnp, pathlib, sys
        def f(x):
            y = x @ x
            return (y.T @ x) * 2 + y
        compiled = jax.jit(f).lower(jnp.ones((1024, 1024))).compile(
            compiler_options={"xla_dump_to": sys.argv[1], "xla_dump_hlo_as_text": True})
        (pathlib.Path(sys.argv[1]) / "program.txt").write_text(compiled.as_text())
    """
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment, timeout=120)
    [report] = tmp_path.glob("*jit_f*live-range.txt")
    peak = read_peak(report.read_text(), read_program((tmp_path / "program.txt").read_text()))
    assert 3 * 2**22 <= peak.bytes < 4 * 2**22 + 4096
    assert {buffer.bytes for buffer in peak.buffers[:3]} == {2**22}
    assert "<string>:4" in {buffer.source for buffer in peak.buffers}
