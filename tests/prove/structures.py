"""The shipped model structures, and settings that none of them has: three parts of `make prove` verify them."""

from __future__ import annotations

import jax
from rich.console import Console

from jaxtrain.config import CONFIG_ROOT, RunConfig, load_config, replace
from jaxtrain.prove.show import fault_lines, show_report
from jaxtrain.prove.shrink import shrink
from jaxtrain.prove.verify import verify

CONFIGS = sorted(path.stem for path in (CONFIG_ROOT / "models").glob("*.yaml"))
FAMILY = "models/llama3_8b.yaml"
EXTRA: dict[str, tuple[str, ...]] = {
    "soft caps, windows, relu2": (
        "model.attention_softcap=20", "model.logit_softcap=10", "model.windows=[1024,null]", "model.activation=relu2",
        "model.tied_head=true",
    ),
    "muon": ("optimizer.name=muon",),
    "lion": ("optimizer.name=lion",),
    "adafactor": ("optimizer.name=adafactor",),
}  # fmt: skip


def structures() -> dict[str, RunConfig]:
    """Configurations that still differ after shrinking."""
    every = {name: load_config(f"models/{name}.yaml") for name in CONFIGS}
    every |= {name: replace(load_config(FAMILY), *overrides) for name, overrides in EXTRA.items()}
    distinct: dict[str, RunConfig] = {}
    for name, config in every.items():
        if shrink(config) not in map(shrink, distinct.values()):
            distinct[name] = config
    return distinct


def prove_every_layout(name: str) -> None:
    report = verify(STRUCTURES[name], "all", jax.devices()[:8])
    show_report(report, Console(width=160))
    assert not report.faults, "\n".join(fault_lines(report))
    assert report.counts["passed"] >= 20
    assert max(r.worst.error for r in report.results if r.worst and r.worst.kind == "gradient") <= 2e-5


STRUCTURES = structures()
MIXTURES = [name for name, config in STRUCTURES.items() if config.model.moe.experts]
SETTINGS = [name for name in EXTRA if name in STRUCTURES]
