"""Where the time of a run went: every second from its first to its last sign of life, counted once.

Made from events.jsonl and metrics.jsonl alone. Durations come from clocks that do not jump where an event has them;
the wall clock counts between different machines and boots only, and never backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.observe.events import EVENTS, read_events
from jaxtrain.observe.files import METRICS, read_metrics

CATEGORIES = {
    "productive": "steps that the run kept",
    "data_wait": "waiting for batches, in those steps",
    "evaluation": "held-out loss",
    "checkpoint": "training blocked by saves",
    "compile": "compiling steps",
    "restore": "restoring checkpoints",
    "startup": "joining, reading the corpus, creating the state",
    "lost": "steps that a failure or a rollback undid",
    "downtime": "a stuck rank, and from a failure to the next start",
    "other": "end of the run: summary, plots, sample",
}
"""The rows of the report: name and meaning."""

_SPANS = {
    "restored": ("restore", "seconds"), "compiled": ("compile", "seconds"), "checkpoint": ("checkpoint", "blocked_s"),
    "local_checkpoint": ("checkpoint", "blocked_s"), "evaluation": ("evaluation", "seconds"),
}  # fmt: skip
"""Events at the end of something: its category, and the value that has its seconds."""

_SAVES = ("checkpoint", "local_checkpoint")

Event = dict[str, Any]
Seconds = dict[str, float]


@dataclass
class Attempt:
    """From one start of the processes to their end; `at` of each event is in seconds since the first one."""

    begin: float
    events: list[tuple[float, Event]] = field(default_factory=list)
    end: float = 0.0

    def find(self, *kinds: str) -> tuple[float, Event] | None:
        """The first event of these kinds."""
        return next(((at, event) for at, event in self.events if event["kind"] in kinds), None)

    @property
    def start_step(self) -> int | None:
        """The step that it resumed at, None where it did not come so far."""
        found = self.find("start") or self.find("restored")
        return int(found[1].get("step") or 0) if found else None

    @property
    def kept_all(self) -> bool:
        """Whether it ended by itself, with a checkpoint: at its last step, or after a signal."""
        found = self.find("end")
        return self.find("stopped") is not None or (found is not None and found[1].get("status") in (0, 75))


@dataclass(frozen=True)
class Goodput:
    """The report of one run; `seconds` has CATEGORIES as keys and adds up to `wall_s`."""

    wall_s: float
    seconds: Seconds
    steps: int
    steps_lost: int
    restarts: list[dict[str, Any]]
    """One for each start after the first: cause, rank, host, step, phase, steps_lost, downtime_s, lost_s."""
    ended: str
    """How the newest start ended."""

    @property
    def goodput(self) -> float:
        """Productive share of the wall time, from 0 to 1."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """All numbers; `share` has the categories as shares of the wall time."""
        share = {name: value / self.wall_s if self.wall_s else 0.0 for name, value in self.seconds.items()}
        return {
            "wall_s": self.wall_s, "goodput": self.goodput, "seconds": self.seconds, "share": share,
            "steps": self.steps, "steps_lost": self.steps_lost, "restarts": self.restarts, "ended": self.ended,
        }  # fmt: skip


def measure_goodput(run_dir: Path) -> Goodput:
    """The goodput of a run directory; raises ConfigError where it has no events."""
    events = read_events(run_dir)
    if not any(event["kind"] == "start" for event in events):
        raise ConfigError(
            f"{run_dir} has no start in {EVENTS}: name the directory of a run that has started "
            "(runs of version 0.1 wrote no events)"
        )
    path = run_dir / METRICS
    return goodput_of(events, read_metrics(run_dir), path.stat().st_mtime if path.exists() else None)


def goodput_of(events: Sequence[Event], rows: Sequence[Mapping[str, Any]], written: float | None = None) -> Goodput:
    """Goodput from events in file order and the rows of metrics; `written` is when the newest row was (wall clock).

    Raises IndexError without events.
    """
    attempts = split_attempts(events)
    last, last_event = attempts[-1], events[-1]
    if written is not None and last.find("end", "failure") is None:
        last.end += max(written - last_event["time"], 0.0)
    kept, newest = [0] * len(attempts), _kept_by_last(last)
    for i in reversed(range(len(attempts))):
        # A fall-back to an older checkpoint also loses steps of starts long before.
        kept[i] = newest
        start = attempts[i].start_step
        newest = newest if start is None else min(newest, start)
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    restarts = []
    for i, attempt in enumerate(attempts):
        mine = _spend(attempt, kept[i], rows)
        following = attempts[i + 1] if i + 1 < len(attempts) else None
        if following is not None:
            mine["downtime"] += following.begin - attempt.end
            restarts.append(_describe_restart(attempt, following, mine))
        for name, value in mine.items():
            seconds[name] += value
    lost = sum(int(event.get("steps") or 0) for event in events if event["kind"] == "lost")
    lost += sum(int(event["step"]) - int(event["to"]) for event in events if event["kind"] == "rollback")
    return Goodput(sum(seconds.values()), seconds, len(rows), lost, restarts, _cause(last) or "it runs")


def split_attempts(events: Iterable[Event]) -> list[Attempt]:
    """The starts of a run, with their events on one clock that never goes back."""
    attempts: list[Attempt] = []
    now, before = 0.0, None
    for event in events:
        now += _elapsed(before, event) if before is not None else 0.0
        before, kind = event, event["kind"]
        current = attempts[-1] if attempts else None
        begins = kind in ("generation", "restored", "start", "lost")
        fresh = current is None or (
            begins and (kind == "generation" or current.find("start", "end", "failure") is not None)
        )
        if current is None or fresh:
            current = Attempt(now)
            attempts.append(current)
        current.events.append((now, event))
        current.end = now
    for i, attempt in enumerate(attempts):
        _find_limits(attempt, attempts[i - 1].end if i else None, attempts[i + 1] if i + 1 < len(attempts) else None)
    origin = attempts[0].begin if attempts else 0.0
    for attempt in attempts:
        attempt.begin, attempt.end = attempt.begin - origin, attempt.end - origin
        attempt.events = [(at - origin, event) for at, event in attempt.events]
    return attempts


def _find_limits(attempt: Attempt, floor: float | None, following: Attempt | None) -> None:
    """Begin and end of an attempt: before its first event by what "start" says, after its last by the lost rows."""
    found = attempt.find("start")
    if found is not None and attempt.events[0][1]["kind"] != "generation" and "began" in found[1]:
        began = found[0] - max(found[1]["time"] - found[1]["began"], 0.0)
        attempt.begin = min(attempt.begin, began if floor is None else max(began, floor))
    if (failure := attempt.find("failure")) is not None:
        # The supervisor records it when all processes have ended.
        attempt.end = max(failure[0] - float(failure[1].get("ago_s") or 0.0), attempt.begin)
    elif (ended := attempt.find("end")) is not None:
        attempt.end = ended[0]
    elif following is not None and (lost := following.find("lost")) is not None and lost[1].get("written"):
        written = lost[0] - max(lost[1]["time"] - lost[1]["written"], 0.0)
        attempt.end = min(max(attempt.end, written), following.begin)


def _elapsed(before: Event, event: Event) -> float:
    """Seconds between two events: never negative, by the clock that does not jump where both have the same."""
    same = before.get("boot") is not None and before.get("boot") == event.get("boot")
    if same and "mono" in before and "mono" in event:
        return max(float(event["mono"]) - float(before["mono"]), 0.0)
    return max(float(event["time"]) - float(before["time"]), 0.0)


def _kept_by_last(attempt: Attempt) -> int:
    """The step up to which the newest start's work stands: all while it runs, else its newest checkpoint."""
    if attempt.kept_all or attempt.find("end", "failure") is None:
        return 1 << 62
    saved = [int(event["step"]) for _, event in attempt.events if event["kind"] in _SAVES]
    return max([attempt.start_step or 0, *saved])


def _spend(attempt: Attempt, kept: int, rows: Sequence[Mapping[str, Any]]) -> Seconds:
    """The seconds of one attempt by category; they add up to its length."""
    spent = dict.fromkeys(CATEGORIES, 0.0)
    end = attempt.end
    failure = attempt.find("failure")
    if failure is not None and failure[1].get("cause") == "stuck":
        stuck = min(float(failure[1].get("since_s") or 0.0), end - attempt.begin)
        spent["downtime"], end = stuck, end - stuck
    compiled = attempt.find("compiled")
    first = min(compiled[0] if compiled else end, end)
    keep = _time_of_step(attempt, kept, first, end)
    spans = _spans(attempt)
    spent["startup"] = _divide(attempt.begin, first, spans, spent)
    trained = _divide(first, keep, spans, spent)
    rolled_s, rolled = _rolled_back(attempt, first, keep, spans)
    spent["lost"], trained = end - keep + rolled_s, trained - rolled_s
    start = attempt.start_step or 0
    mine = [row for row in rows if start < row["step"] <= kept and row["step"] not in rolled]
    wait = sum(float(row.get("data_wait_s") or 0.0) for row in mine)
    steps = sum(float(row.get("step_time_s") or 0.0) for row in mine)
    spent["data_wait"] = min(wait, trained)
    spent["productive"] = min(max(steps - wait, 0.0), trained - spent["data_wait"])
    spent["other"] = trained - spent["data_wait"] - spent["productive"]
    return spent


def _rolled_back(
    attempt: Attempt, first: float, keep: float, spans: Sequence[tuple[float, float, str]]
) -> tuple[float, set[int]]:
    """Seconds and steps that rollbacks to a checkpoint within the attempt have undone."""
    seconds, steps, before = 0.0, set(), first
    for at, event in attempt.events:
        if event["kind"] == "rollback" and before <= at <= keep:
            to = int(event["to"])
            begin = max(_time_of_step(attempt, to, first, at), before)
            seconds += _divide(begin, at, spans, dict.fromkeys(CATEGORIES, 0.0))
            steps |= set(range(to + 1, int(event["step"]) + 1))
            before = at
    return seconds, steps


def _time_of_step(attempt: Attempt, kept: int, first: float, end: float) -> float:
    """When the attempt had done the last step that was kept; `first` is when it began to train."""
    start = attempt.start_step or 0
    if kept <= start:
        return first
    if attempt.kept_all and kept >= max(int(event.get("step") or 0) for _, event in attempt.events):
        return end
    saved = [at for at, event in attempt.events if event["kind"] in _SAVES and int(event["step"]) <= kept]
    if kept >= 1 << 62 or not saved:
        return end
    return min(max(saved[-1], first), end)


def _spans(attempt: Attempt) -> list[tuple[float, float, str]]:
    """(begin, end, category) of what events say about the time before them, in order, without overlap."""
    found, before = [], attempt.begin
    for at, event in attempt.events:
        if event["kind"] in _SPANS:
            category, value = _SPANS[event["kind"]]
            begin = max(at - max(float(event.get(value) or 0.0), 0.0), before)
            found.append((begin, at, category))
            before = at
    return found


def _divide(begin: float, end: float, spans: Sequence[tuple[float, float, str]], spent: Seconds) -> float:
    """Add the spans within [begin, end] to `spent`; returns the seconds between them."""
    rest = end - begin
    for a, b, category in spans:
        inside = max(min(b, end) - max(a, begin), 0.0)
        spent[category] += inside
        rest -= inside
    return max(rest, 0.0)


def _cause(attempt: Attempt) -> str:
    """Why an attempt ended, '' where nothing says it."""
    failure, end, stopped = attempt.find("failure"), attempt.find("end"), attempt.find("stopped")
    if stopped is not None:
        return f"{stopped[1].get('signal') or 'a signal'}, saved"
    if failure is not None:
        return str(failure[1].get("cause"))
    return str(end[1].get("cause")) if end is not None else ""


def _describe_restart(attempt: Attempt, following: Attempt, spent: Seconds) -> dict[str, Any]:
    failure = (attempt.find("failure") or (0.0, {}))[1]
    lost = (following.find("lost") or (0.0, {}))[1]
    return {
        "at_s": attempt.end,
        "cause": _cause(attempt) or "ended without a word (killed, or the machine failed)",
        **{name: failure.get(name) for name in ("status", "rank", "host", "step", "phase")},
        "steps_lost": int(lost.get("steps") or 0),
        "lost_s": spent["lost"],
        "downtime_s": spent["downtime"],
    }
