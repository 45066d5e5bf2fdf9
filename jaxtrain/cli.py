"""The verbs, thin: parse, call, print. Settings are overridden by `--section.key value`, `--section.key=value`."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro
from rich.console import Console
from tyro.conf import Positional, arg, subcommand

from jaxtrain.config import ConfigError, RunConfig, load_config
from jaxtrain.launch.process import enough_threads
from jaxtrain.verbs import Data, ExportHf, ImportHf, Tokenize, print_json

_JOIN = "Where process 0 listens, host:port; with --processes and --process-id this process joins the job by hand."


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a run to its last update; the same command again resumes it."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]]
    """YAML file, or the name of a shipped one."""
    run: Path | None = None
    """Run directory; default runs/CONFIG."""
    coordinator: Annotated[str | None, arg(help=_JOIN)] = None
    processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """Number of this process, from 0."""
    json: bool = False
    """Print the summary as one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Join the job, train, print the summary."""
        config = load_config(self.config, overrides)
        directory = self.run or _default_run(self.config)
        from jaxtrain.launch.distributed import guard, join

        def body() -> int:
            from jaxtrain.train.loop import train

            result = train(config, directory, quiet=self.json)
            if self.json:
                print_json(result)
            return 0

        join(self.coordinator, self.processes, self.process_id)
        return guard(body)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start several processes of one run on this machine, or join one process by hand or under Slurm."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]]
    """YAML file, or the name of a shipped one."""
    run: Path | None = None
    """Run directory; default runs/CONFIG."""
    processes: int | None = None
    """Processes to start here, or of the whole job when --process-id is given."""
    devices_per_process: int | None = None
    """Devices of each process started here; default all that it sees."""
    coordinator: Annotated[str | None, arg(help=_JOIN)] = None
    process_id: int | None = None
    """Number of this process, from 0; nothing is started then, this process joins."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Start the processes and wait for them; the first failure ends the others."""
        from jaxtrain.launch.distributed import under_scheduler
        from jaxtrain.launch.local import launch

        directory = self.run or _default_run(self.config)
        if (
            self.process_id is not None
            or self.coordinator is not None
            or (self.processes is None and under_scheduler())
        ):
            verb = Train(self.config, directory, self.coordinator, self.processes, self.process_id)
            return verb(overrides)
        if self.processes is None:
            raise ConfigError("launch needs --processes N (processes to start on this machine)")
        load_config(self.config, overrides)
        command = [sys.executable, "-m", "jaxtrain", "train", self.config, "--run", str(directory)]
        command += [f"--{override}" for override in overrides]
        return launch(command, self.processes, self.devices_per_process)


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show how a configuration lies on a mesh: no such devices are needed."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]]
    """YAML file, or the name of a shipped one."""
    devices: int | None = None
    """Devices to imagine; default those of --cluster, or of this machine."""
    cluster: str | None = None
    """A described cluster, such as h100_8x8 (configs/clusters)."""
    diff: tuple[str, ...] = ()
    """Overrides to compare with, such as rules.mlp=null."""
    schedule: bool = False
    """Show the pipeline's schedule instead: what each stage does when, bubble, memory."""
    schedule_svg: Path | None = None
    """Write the schedule's picture to this file."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Print the tables."""
        if self.schedule or self.schedule_svg:
            return self._show_schedule(overrides)
        from jaxtrain.inspect import inspect

        before = inspect(load_config(self.config, overrides), self.devices, self.cluster)
        shown: Any = before.diff(*self.diff) if self.diff else before
        if self.json:
            print_json(shown.to_json())
        else:
            shown.print(Console())
        return 0

    def _show_schedule(self, overrides: Sequence[str]) -> int:
        from jaxtrain.pipeline.show import show_schedule

        if self.diff:
            raise ConfigError("--diff compares layouts: leave it out beside --schedule")
        picture = show_schedule(load_config(self.config, overrides), self.devices, self.cluster)
        if self.schedule_svg:
            self.schedule_svg.write_text(picture.svg())
        if self.json:
            print_json(picture.to_json())
        else:
            picture.print(Console())
        return 0


@dataclasses.dataclass(frozen=True)
class Eval:
    """Loss of a run's newest checkpoint on its held-out documents."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, evaluate, print."""
        from jaxtrain.train.step import jit_evaluate
        from jaxtrain.train.use import held_out, mean_loss, open_run

        opened = open_run(self.run, overrides)
        batches = held_out(opened.setup, opened.corpus)
        loss, scored = mean_loss(jit_evaluate(opened.setup.step), opened.params, batches)
        if self.json:
            print_json({"step": opened.step, "eval_loss": loss, "scored_tokens": scored})
        else:
            print(f"update {opened.step}: held-out loss {loss:.4f} over {scored:,} tokens")
        return 0


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt with a run's newest checkpoint."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory."""
    prompt: str
    """Text to go on from."""
    tokens: int = 96
    """Tokens to add, at most data.seq_len with the prompt's."""
    temperature: float = 0.7
    """Softmax temperature; 0 is greedy."""
    seed: int = 0
    """Seed of the draw."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, sample, print."""
        from jaxtrain.train.use import continue_text, open_run

        if self.tokens < 1 or self.temperature < 0:
            raise ConfigError(f"--tokens {self.tokens} --temperature {self.temperature}: at least 1 token, at least 0")
        opened = open_run(self.run, overrides)
        at = (self.prompt, self.tokens, self.temperature, self.seed)
        print(continue_text(opened.setup, opened.corpus, opened.params, *at))
        return 0


@dataclasses.dataclass(frozen=True)
class Compile:
    """Compile the train step for a cluster that is not there: memory, FLOPs, collectives; exit 2 if it does not fit."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]]
    """YAML file, or the name of a shipped one."""
    cluster: str | None = None
    """A described cluster, such as h100_8x8 (configs/clusters), or a YAML file; default the config's own."""
    devices: int | None = None
    """Devices to compile for; default those of the cluster."""
    target: str = "cuda"
    """cuda (needs make setup-plan), cpu (needs nothing, less exact), tpu (needs libtpu)."""
    timeout: float = 600.0
    """Seconds after which the compiler is ended."""
    diff: str | None = None
    """Another config to compile and show beside this one."""
    html: Path | None = None
    """Write one self-contained page here."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Compile, print; overrides act on both configs of a diff."""
        from jaxtrain.program.compile import compile_for, named_cluster
        from jaxtrain.program.page import write_page
        from jaxtrain.program.show import fit_line, show_diff, show_report

        names = [self.config] if self.diff is None else [self.config, self.diff]
        configs = [load_config(name, overrides) for name in names]
        own = [override for override in overrides if override.startswith("cluster.")]
        cluster = None if self.cluster is None else named_cluster(self.cluster, own)
        reports = [
            compile_for(config, cluster, self.devices, self.target, self.timeout)  # type: ignore[arg-type]
            for config in configs
        ]
        if self.html is not None:
            write_page(reports[0], self.html)
        if self.json:
            trees = {name: report.to_json() for name, report in zip(names, reports, strict=True)}
            print_json(trees if self.diff else reports[0].to_json())
        elif self.diff is not None:
            show_diff(reports[0], reports[1], (self.config, self.diff), Console())
        else:
            show_report(reports[0], Console())
        misfits = [report for report in reports if report.memory.fits is False]
        for report in misfits:
            print(f"jaxtrain: {fit_line(report)}", file=sys.stderr)
        return 2 if misfits else 0


@dataclasses.dataclass(frozen=True)
class Verify:
    """Prove on a small model of the same structure that no layout changes the answer; exit 1 names the guilty leaf."""

    config: Positional[Annotated[str | None, arg(metavar="CONFIG")]] = None
    """YAML file, or the name of a shipped one; none with --reference."""
    devices: int = 8
    """Devices, simulated where there are not as many."""
    layouts: str = "all"
    """all, file (the configuration's own), or layouts such as 'data=2,tensor=2;tensor=4,rules.preset=[tensor]'."""
    reference: Path | None = None
    """Hugging Face folder with reference.npz and reference.json: compare with what PyTorch computed instead."""
    mesh: str | None = None
    """Sizes for --reference, such as data=2,tensor=2; default one device."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Prove, print the table."""
        if (self.config is None) == (self.reference is None):
            raise ConfigError("verify takes a CONFIG, or --reference DIR: name one of the two")
        if self.mesh is not None and self.reference is None:
            raise ConfigError(f"--mesh {self.mesh} is for --reference: say --layouts '{self.mesh}'")
        from jaxtrain.prove.devices import find_devices

        config = None if self.config is None else load_config(self.config, overrides)
        devices = find_devices(self.devices)
        return self._reference(overrides, devices) if config is None else self._layouts(config, devices)

    def _layouts(self, config: RunConfig, devices: list[Any]) -> int:
        from jaxtrain.prove.show import fault_lines, report_to_json, show_report, verify_progress
        from jaxtrain.prove.verify import verify

        errors = Console(stderr=True)
        with verify_progress(errors, bar=config.observe.progress and errors.is_terminal) as on_progress:
            report = verify(config, self.layouts, devices, on_progress)
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


VERBS = {
    "train": Train,
    "launch": Launch,
    "eval": Eval,
    "generate": Generate,
    "inspect": Inspect,
    "compile": Compile,
    "data": Data,
    "tokenize": Tokenize,
    "import-hf": ImportHf,
    "export-hf": ExportHf,
    "verify": Verify,
}


def main(argv: Sequence[str]) -> int:
    """Run one verb; a ConfigError becomes one message on stderr and exit status 2."""
    # Orbax logs whole tracebacks of damaged files before our one message.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if (simulated := os.environ.get("JAX_NUM_CPU_DEVICES", "1")).isdecimal():
        enough_threads(int(simulated))
    try:
        rest, overrides = split_overrides(argv)
        verb: Any = tyro.cli(_verbs(), prog="jaxtrain", args=rest)
        return int(verb(overrides))
    except ConfigError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxtrain: interrupted; the same command resumes from the newest checkpoint", file=sys.stderr)
        return 130


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--section.key value` and `--section.key=value` out of a command line, as `section.key=value`."""
    rest: list[str] = []
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not equals:
            try:
                value = next(words)
            except StopIteration:
                raise ConfigError(f"{word} has no value: write {word} VALUE or {word}=VALUE") from None
        overrides.append(f"{key}={value}")
    return rest, overrides


def _verbs() -> Any:
    return Union[tuple(Annotated[verb, subcommand(name)] for name, verb in VERBS.items())]  # noqa: UP007


def _default_run(config: str) -> Path:
    return Path("runs") / Path(config).stem
