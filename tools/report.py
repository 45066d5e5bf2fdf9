"""Compile published models under six layouts for one cluster and write docs/layouts.md: `make report`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxtrain.config import ConfigError, RunConfig, load_config
from jaxtrain.program.compile import compile_for
from jaxtrain.program.report import ProgramReport
from jaxtrain.report.tables import gib, percent

MODELS = {
    "gpt2": ["data.seq_len=1024", "train.global_batch=512"],
    "llama3_8b": ["data.seq_len=4096", "train.global_batch=64"],
    "llama3_70b": ["data.seq_len=4096", "train.global_batch=64"],
}
LAYOUTS = {
    "ddp": ["mesh.data=64", "mesh.tensor=1", "rules.preset=[ddp]"],
    "zero1": ["mesh.data=64", "mesh.tensor=1", "rules.preset=[zero1]"],
    "zero2": ["mesh.data=64", "mesh.tensor=1", "rules.preset=[zero2]"],
    "fsdp": ["mesh.data=64", "mesh.tensor=1", "rules.preset=[fsdp]"],
    "zero1 x tensor 8": ["mesh.data=8", "mesh.tensor=8", "rules.preset=[zero1, tensor_sequence]"],
    "fsdp x tensor 8": ["mesh.data=8", "mesh.tensor=8", "rules.preset=[fsdp, tensor_sequence]"],
}
# Sequences of one microbatch of a replica; the rest of the global batch is accumulated.
COMMON = ["precision.compute=bfloat16", "remat.policy=full", "train.accumulation=null"]
ALLOW = {"gpt2": ["rules.allow=[indivisible:*]"]}
MICROBATCH = {"gpt2": 8, "llama3_8b": 1, "llama3_70b": 1}
HEAD = (
    "| model | layout | peak GiB | fits | executed / model FLOPs | inside, GiB | covered | across, GiB | covered "
    "| gradient reductions | compile s |\n|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)
TEXT = """# What a layout costs

Written by `make report` (`tools/report.py`): the train step of {models} compiled under six layouts
for {cluster} ({devices} x {card}, jax {version}, {target}), full remat, bfloat16. Nothing was run on such a cluster.

Peak is of one device, against the card's {memory} GiB. FLOPs are those of matmuls, against the model's by the formula
of `jaxtrain/observe/flops.py` with full scores. Bytes are what one device sends in one step inside its fast domain
and across domains; covered is the share of their transfer time, at the links' published speed, behind matmuls scheduled
between start and done. Batch of a step: {rows}.

Sequences per replica in a microbatch: {microbatches}; the rest is accumulated.

Attention runs in tokamax' kernel, whose FLOPs the program does not contain: they are not counted as executed.
Where a program does not fit, its FLOPs rise, presumably because the compiler recomputes.
8 does not divide GPT-2's 12 heads: each device of a tensor group computes its whole attention and the projections
around it.

{table}
"""


@dataclass(frozen=True)
class Row:
    """One compiled layout, or why it was refused."""

    model: str
    layout: str
    report: ProgramReport | None
    refusal: str = ""

    def __str__(self) -> str:
        if self.report is None:
            return f"| {self.model} | {self.layout} | - | {self.refusal} | | | | | | | |"
        report = self.report
        cells = [
            self.model,
            self.layout,
            gib(report.memory.peak),
            "yes" if report.memory.fits else "no",
            f"{report.flops.ratio:.2f}",
            gib(report.link_bytes("fast")),
            percent(report.coverage["fast"]) if "fast" in report.coverage else "-",
            gib(report.link_bytes("network")),
            percent(report.coverage["network"]) if "network" in report.coverage else "-",
            str(report.reductions.calls),
            f"{report.compile_seconds:.0f}",
        ]
        return f"| {' | '.join(cells)} |"


def configure(model: str, layout: str) -> RunConfig:
    """A shipped run with the table's batch and this layout."""
    overrides = [*COMMON, *MODELS[model], *LAYOUTS[layout], *ALLOW.get(model, [])]
    return load_config(model, [*overrides, f"train.microbatch={MICROBATCH[model]}"])


def main() -> int:
    """Compile, write the page, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="h100_8x8")
    parser.add_argument("--target", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "layouts.md")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for layout in LAYOUTS:
            try:
                row = Row(
                    model, layout, compile_for(configure(model, layout), arguments.cluster, target=arguments.target)
                )
            except ConfigError as error:
                row = Row(model, layout, None, str(error).splitlines()[0])
            print(row, flush=True)
            rows.append(row)
    first = next((row.report for row in rows if row.report is not None), None)
    if first is None:
        print("report: nothing compiled", file=sys.stderr)
        return 2
    text = TEXT.format(
        models=", ".join(arguments.models),
        cluster=arguments.cluster,
        devices=first.devices,
        card=first.card,
        version=first.version,
        target=arguments.target,
        memory=gib(first.memory.card or 0),
        rows=", ".join(f"{name} {' '.join(MODELS[name])}" for name in arguments.models),
        microbatches=", ".join(f"{name} {MICROBATCH[name]}" for name in arguments.models),
        table="\n".join([HEAD, *map(str, rows)]),
    )
    arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
