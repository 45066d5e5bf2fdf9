"""Inject every fault and write what each one cost: `campaign.py [--only TEXT] [--out results.json] [--docs FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.fault import Fault, Outcome, inject
from faults.page import write_page
from faults.runs import Bench
from faults.table import GROUPS

KINDS = ("alone", "jobs")


def faults(only: Sequence[str] = (), kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, Fault]]:
    """All faults with their group, or those whose group or name contains one of the texts.

    `kinds`: 'alone' are the faults of a single process, 'jobs' those of several or under a supervisor.
    """
    for group, table in GROUPS.items():
        for fault in table():
            kind = "jobs" if fault.processes > 1 or fault.supervise else "alone"
            named = not only or any(text in f"{group}: {fault.name}" for text in only)
            if kind in kinds and named:
                yield group, fault


def main(argv: Sequence[str]) -> int:
    """The command; 1 where a fault had another outcome than the stated one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="part of a group or a name; may be repeated")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of a single process, or of a job; default both")
    parser.add_argument("--out", type=Path, help="JSON of outcomes; those of other faults in it stay")
    parser.add_argument("--docs", type=Path, help="page to write")
    parser.add_argument("--keep", type=Path, help="folder of the runs, which is kept")
    options = parser.parse_args(argv)
    # A campaign that is asked to end ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.keep or Path(tempfile.mkdtemp(prefix="jaxtrain-faults-"))
    outcomes: list[Outcome] = []
    try:
        bench = Bench(folder)
        for group, fault in faults(options.only, options.kind or KINDS):
            outcome = inject(bench, group, fault)
            outcomes.append(outcome)
            print(describe(outcome), flush=True)
            if options.out:
                save(options.out, [outcome])
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.docs:
        known = load(options.out) if options.out else outcomes
        measured = {(one.group, one.name) for one in known}
        missing = [f"{group}: {fault.name}" for group, fault in faults() if (group, fault.name) not in measured]
        options.docs.write_text(write_page(known, missing))
    failed = sum(outcome.result == "failed" for outcome in outcomes)
    print(f"{len(outcomes)} faults, {failed} failed, {sum(o.result == 'not run' for o in outcomes)} not run")
    return 1 if failed else 0


def describe(outcome: Outcome) -> str:
    """One line, and one for each problem."""
    numbers = f"{outcome.detected_s} s, lost {outcome.steps_lost}, new step {outcome.first_step_s} s"
    line = f"{outcome.result:8} {outcome.name}: status {outcome.status}, {numbers} ({outcome.seconds} s)"
    return "\n".join([line, *(f"         {problem}" for problem in outcome.problems)])


def load(path: Path) -> list[Outcome]:
    """The outcomes of a file, in the order of the table, without those of faults that are no longer in it."""
    found = {(one["group"], one["name"]): Outcome(**one) for one in json.loads(path.read_text())}
    return [found[key] for key in ((group, fault.name) for group, fault in faults()) if key in found]


def save(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes into a file; those of other faults stay in it."""
    old = load(path) if path.exists() else []
    new = {(one.group, one.name): one for one in [*old, *outcomes]}
    path.write_text(json.dumps([one.as_json() for one in new.values()], indent=1))


if __name__ == "__main__":
    os.nice(5)
    raise SystemExit(main(sys.argv[1:]))
