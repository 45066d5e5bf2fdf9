"""`jaxtrain compile`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass
from rich.console import Console

from jaxtrain.cli.output import print_json
from jaxtrain.cli.verb import VERB, Config, Verb
from jaxtrain.config import load_config, named_cluster


@dataclass(frozen=True, config=VERB)
class Compile(Verb):
    """Compile the train step for a described cluster and report memory, FLOPs and collectives.

    The exit status is 2 if the step does not fit the memory of a device.
    """

    config: Config
    """YAML file, name of a shipped configuration, or a run directory."""
    cluster: str | None = None
    """A described cluster, such as h100_8x8 (configs/clusters), or a YAML file; default that of CONFIG."""
    devices: int | None = None
    """Number of devices; default those of the cluster."""
    target: Literal["cuda", "cpu", "tpu"] = "cuda"
    """cuda (default; needs make setup-plan), cpu (needs nothing, less exact), tpu (needs libtpu)."""
    timeout: float = 600.0
    """Seconds after which the compiler is ended. Default 600."""
    diff: str | None = None
    """Another configuration to compile and to show beside this one."""
    html: Path | None = None
    """Write one self-contained page to this file."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain compile llama3_8b --cluster h100_8x8 --html report.html"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Compile, print; overrides apply to both configurations of a diff."""
        from jaxtrain.program.compile import compile_for
        from jaxtrain.report.compiled import fit_line, print_compiled, print_compiled_diff
        from jaxtrain.report.page import write_page

        names = [self.config] if self.diff is None else [self.config, self.diff]
        configs = [load_config(name, overrides) for name in names]
        of_cluster = [override for override in overrides if override.startswith("cluster.")]
        cluster = None if self.cluster is None else named_cluster(self.cluster, of_cluster)
        reports = [compile_for(config, cluster, self.devices, self.target, self.timeout) for config in configs]
        if self.html is not None:
            write_page(reports[0], self.html)
        if self.json:
            trees = {name: report.to_json() for name, report in zip(names, reports, strict=True)}
            print_json(trees if self.diff else reports[0].to_json())
        elif self.diff is not None:
            print_compiled_diff(reports[0], reports[1], (self.config, self.diff), Console())
        else:
            print_compiled(reports[0], Console())
        misfits = [report for report in reports if report.memory.fits is False]
        for report in misfits:
            print(f"jaxtrain: {fit_line(report)}", file=sys.stderr)
        return 2 if misfits else 0
