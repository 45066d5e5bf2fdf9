"""Programs as text: stored ones, and small ones written for a test."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

from jaxtrain.program.hlo import Program, read_program

STORED = Path(__file__).parent.parent / "data" / "hlo"


@cache
def llama() -> Program:
    """Llama-3 8B, 64 sequences of 4,096, data 8 (fsdp) x tensor 8, full remat, compiled for 64 H100."""
    return read_program(stored("llama3_8b_h100_fsdp8_tensor8.txt.gz"))


def stored(name: str) -> str:
    return gzip.decompress((STORED / name).read_bytes()).decode()


def module(entry: str, others: str = "", header: str = "is_scheduled=true, num_partitions=8") -> str:
    """A module of one entry computation; `entry` and `others` are lines as XLA prints them."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return f"HloModule jit_f, {header}\n\n{ADD}\n{others}\nENTRY %main (a: f32[4]) -> f32[4] {{\n{lines}\n}}\n"


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
