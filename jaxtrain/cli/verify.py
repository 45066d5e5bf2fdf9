"""`jaxtrain verify`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic.dataclasses import dataclass
from rich.console import Console

from jaxtrain.cli.output import print_json
from jaxtrain.cli.verb import VERB, Positional, Verb
from jaxtrain.config import ConfigError, RunConfig, load_config


@dataclass(frozen=True, config=VERB)
class Verify(Verb):
    """Prove on a small model of the same structure that no layout changes the result.

    The exit status is 1 if a layout differs; the message names the first parameter that does.
    """

    config: Annotated[str | None, Positional("CONFIG")] = None
    """YAML file, name of a shipped configuration, or a run directory; none with --reference."""
    devices: int = 8
    """Number of devices, simulated if there are fewer. Default 8."""
    layouts: str = "all"
    """all (default), file (that of the configuration), or layouts: 'data=2,tensor=2;tensor=4,rules.preset=[tensor]'."""
    reference: Path | None = None
    """Hugging Face folder with reference.npz and reference.json: compare with the results of PyTorch instead."""
    mesh: str | None = None
    """Mesh sizes for --reference, such as data=2,tensor=2; default one device."""
    precision: str | None = None
    """bfloat16, float16, float8, float8_rowwise or mxfp8: compare each gradient leaf in this precision with float32, in
    units of an ideal step's error."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain verify tiny --layouts 'data=2,tensor=2;pipe=2'"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Prove, print the table."""
        if (self.config is None) == (self.reference is None):
            raise ConfigError("verify takes a CONFIG, or --reference DIR: name one of the two")
        if self.mesh is not None and self.reference is None:
            raise ConfigError(f"--mesh {self.mesh} goes with --reference: write --layouts '{self.mesh}'")
        if self.precision is not None and self.reference is not None:
            raise ConfigError(f"--precision {self.precision} goes with a CONFIG, not with --reference")
        from jaxtrain.prove.devices import find_devices

        config = None if self.config is None else load_config(self.config, overrides)
        devices = find_devices(self.devices)
        return self._reference(overrides, devices) if config is None else self._layouts(config, devices)

    def _layouts(self, config: RunConfig, devices: list[Any]) -> int:
        from jaxtrain.prove.low_precision import verify_precision
        from jaxtrain.prove.show import fault_lines, report_to_json, show_report, verify_progress
        from jaxtrain.prove.verify import verify

        errors = Console(stderr=True)
        with verify_progress(errors, bar=config.observe.progress and errors.is_terminal) as on_progress:
            if self.precision is None:
                report = verify(config, self.layouts, devices, on_progress)
            else:
                report = verify_precision(config, self.precision, self.layouts, devices, on_progress)
        if self.json:
            print_json(report_to_json(report))
        else:
            show_report(report, Console())
        for line in fault_lines(report):
            print(f"jaxtrain: {line}", file=sys.stderr)
        return 0 if report.passed else 1

    def _reference(self, overrides: Sequence[str], devices: list[Any]) -> int:
        from jaxtrain.prove.reference import check_reference

        assert self.reference is not None
        sizes = [f"mesh.{item.strip()}" for item in self.mesh.split(",")] if self.mesh else []
        result = check_reference(self.reference, [*sizes, *overrides], devices)
        if self.json:
            print_json(result.to_json())
        else:
            Console().print(result.table())
        for row in (row for row in result.rows if not row.passed):
            text = f"relative error {row.error:.1e}, at most {row.tolerance:.0e} {row.where}".rstrip()
            print(f"jaxtrain: {row.name}: {text}", file=sys.stderr)
        return 0 if result.passed else 1
