"""The live set at the peak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from texts import module

from jaxtrain.program.buffers import Buffer, find_peak
from jaxtrain.program.hlo import read_program

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
  BufferLiveRange:
    a{}:0-9
    early{}:0-1
    all-gather.7{}:2-3
    loop{1}:2-4
    t{2}:2-4
    shared{}:3-3
    lost{}:3-3
    unplaced{}:3-3
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 0:
 value: <1 a @0> (size=400,offset=0): f32[100]
allocation 1: size 2208, preallocated-temp:
 value: <2 early @0> (size=1000,offset=0): f32[250]
 value: <3 all-gather.7 @0> (size=1600,offset=0): f32[400]
 value: <4 loop{1} @0> (size=400,offset=1600): f32[100]
 value: <5 shared @0> (size=100,offset=1600): f32[25]
 value: <6 t{2} (phi) @0> (size=200,offset=2000): f32[50]
 value: <7 lost @0> (size=8,offset=2200): f32[2]
"""


def test_each_buffer_is_traced_to_the_operation_that_made_it() -> None:
    peak = find_peak(REPORT, ASSIGNMENT, read_program(module(ENTRY, LOOP)))
    # `early` is gone by then, `shared` has the address of loop{1} and counts once.
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
        find_peak("HloLiveRange", "BufferAssignment:", read_program(module("ROOT %a = f32[4] parameter(0)")))


def test_the_report_of_this_version_is_read(tmp_path: Path) -> None:
    """On CPU, in a separate process: an argument, two products and the result are 4 MB each."""
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
    [assignment] = tmp_path.glob("*jit_f*buffer-assignment.txt")
    program = read_program((tmp_path / "program.txt").read_text())
    peak = find_peak(report.read_text(), assignment.read_text(), program)
    assert 3 * 2**22 <= peak.bytes < 4 * 2**22 + 4096
    assert {buffer.bytes for buffer in peak.buffers[:3]} == {2**22}
    assert "<string>:4" in {buffer.source for buffer in peak.buffers}
