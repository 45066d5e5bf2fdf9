"""Sinks of a step's metrics: metrics.jsonl, TensorBoard, Weights & Biases, the terminal.

metrics.jsonl is the record that a resumed run continues; the others are views of it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxtrain.config import ConfigError, ObserveConfig, StorageError
from jaxtrain.observe.events import record_event
from jaxtrain.observe.files import METRICS, read_metrics, to_json, truncate_metrics, write_atomic

MetricsRow = dict[str, Any]

LINE_EVERY_S = 5.0


class Sink(Protocol):
    """Receives rows; opened with the last step that stays valid."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the row of one step."""

    def close(self) -> None:
        """Flush and release."""


class Log:
    """The sinks of one run; in a process that is not primary every method does nothing.

    Raises ConfigError when observe.wandb_project is set and the wandb package is missing.
    """

    def __init__(
        self,
        run_dir: Path,
        observe: ObserveConfig,
        primary: bool,
        settings: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        self.run_dir, self.observe, self.primary = Path(run_dir), observe, primary
        self._settings = settings
        self._console = Console(quiet=quiet or not primary)
        self._wandb = _import_wandb(observe.wandb_project) if primary and observe.wandb_project else None
        self._sinks: list[Sink] | None = None

    def resume_at(self, step: int) -> None:
        """Discard everything after `step` (0 for a run from the start), then open the sinks."""
        if not self.primary:
            return
        self.close()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if lost := [row for row in read_metrics(self.run_dir) if row["step"] > step]:
            written = (self.run_dir / METRICS).stat().st_mtime
            record_event(self.run_dir, "lost", step=step, steps=len(lost), written=written)
        last = truncate_metrics(self.run_dir, step)
        if step > 0 and last != step:
            found = "no rows" if last is None else f"rows up to step {last}"
            logging.getLogger("jaxtrain").warning(
                "%s holds %s, the checkpoint is of step %d: the rows between are lost", METRICS, found, step
            )
        self._sinks = [_Jsonl(self.run_dir / METRICS)]
        if self.observe.tensorboard:
            self._sinks.append(_TensorBoard(self.run_dir / "tensorboard", step))
        if self._wandb is not None:
            project = str(self.observe.wandb_project)
            self._sinks.append(_Wandb(self._wandb, project, self.run_dir, self._settings))

    def record(self, row: MetricsRow) -> None:
        """Record one step: flat scalars and a "step"; evaluation results are part of their step's row."""
        if not self.primary:
            return
        if self._sinks is None:
            self.resume_at(int(row["step"]) - 1)
        for sink in self._sinks or []:
            sink.write(row)

    def rows(self) -> list[MetricsRow]:
        """Every row recorded so far, those of earlier starts included; [] where not primary."""
        return read_metrics(self.run_dir) if self.primary else []

    def info(self, text: str) -> None:
        """Print one line, above the progress bar when one is shown."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, done: int = 0) -> Iterator[Callable[[MetricsRow], None]]:
        """Show progress towards `total` steps; yields a function to call with each row.

        A bar on a terminal with observe.progress; else one line for the first and last step and every few seconds.
        """
        if not (self.observe.progress and self._console.is_terminal) or self._console.quiet:
            yield self._print_lines(total, done + 1)
            return
        columns = (
            TextColumn("[bold]step"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console, expand=True) as bar:
            task = bar.add_task("train", total=total, completed=done, numbers="")
            yield lambda row: bar.update(task, completed=row["step"], numbers=describe(row, short=True))

    def close(self) -> None:
        """Flush and close every sink; a second call does nothing."""
        for sink in self._sinks or []:
            sink.close()
        self._sinks = None

    def _print_lines(self, total: int, first: int) -> Callable[[MetricsRow], None]:
        printed = 0.0

        def advance(row: MetricsRow) -> None:
            nonlocal printed
            now = time.monotonic()
            if row["step"] in (first, total) or now - printed >= LINE_EVERY_S:
                printed = now
                self.info(f"step {row['step']}/{total}  {describe(row)}")

        return advance


def describe(row: Mapping[str, Any], short: bool = False) -> str:
    """Loss, learning rate and tokens/s of a row, as far as it has them."""
    words = [
        (f"loss {row['loss']:.4f}" if row.get("loss") is not None else ""),
        (f"lr {row['learning_rate']:.3g}" if row.get("learning_rate") is not None and not short else ""),
        (f"{row['tokens_per_s']:,.0f} tok/s" if row.get("tokens_per_s") is not None else ""),
    ]
    return "  ".join(word for word in words if word)


class _Jsonl:
    def __init__(self, path: Path) -> None:
        # Line-buffered: a killed process loses at most the line that it was writing.
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(to_json(row) + "\n")
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written ({error.strerror}): free space or permit writing and run the same "
                "command again"
            ) from None

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        # purge_step hides what a killed run wrote for this step and later; two starts in one second need the suffix.
        begun = folder.is_dir() and any(folder.iterdir())
        purge = step + 1 if begun else None
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=5, filename_suffix=f".{step:09d}")

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, wandb: Any, project: str, run_dir: Path, settings: Mapping[str, Any] | None) -> None:
        # The id stays with the run directory: a resumed run goes on in the same W&B run.
        file = run_dir / "wandb_id"
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex[:16].encode())
        self._run = wandb.init(
            project=project, id=file.read_text(), name=run_dir.resolve().name, dir=str(run_dir), resume="allow",
            config=dict(settings or {}),
        )  # fmt: skip
        # W&B's own step only grows: it would drop the rows of a run that went back to an earlier checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({**_numbers(row), "step": row["step"]})

    def close(self) -> None:
        self._run.finish()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    values = {name: value.item() if hasattr(value, "item") else value for name, value in row.items() if name != "step"}
    return {name: float(value) for name, value in values.items() if isinstance(value, bool | int | float)}


def _import_wandb(project: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            f"observe.wandb_project is {project!r} but the wandb package is not installed: "
            "pip install wandb, or set observe.wandb_project: null"
        ) from None
    return wandb
