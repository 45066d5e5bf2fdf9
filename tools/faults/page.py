"""docs/faults.md: what each fault of the campaign cost, as it was measured."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Sequence

from faults.fault import Outcome
from faults.runs import EVERY, LIMIT, STEPS

INTRODUCTION = """\
# Faults, and what each one costs

Written by `python tools/faults/campaign.py --docs docs/faults.md`; `make prove PART=campaign` and
`PART=campaign_jobs` inject the same faults.
Every fault is injected into real processes on one machine: `jaxtrain train`, or `jaxtrain launch --processes 2`.

The run has {steps} steps and saves every {every}: a model of some 50,000 parameters, so that the times are those of
starting, noticing and resuming, not of training. After each fault:

- a command that runs longer than {limit:.0f} s counts as hung, and is killed;
- no process, no open port and no temporary file may be left;
- the steps lost must not be more than those since the newest committed checkpoint;
- the rows of `metrics.jsonl` (loss, gradient norm, learning rate, tokens, held-out loss) must be those of the unbroken
  run, bit for bit, or the command must end with the stated status and message.

**Noticed** counts from the injection to the supervisor's report, to the message, or to the end of the command.
**Steps lost** had been computed and were computed again. **First new step** counts from the injection where the
supervisor restarts by itself, else from typing the same command again; most of it is the start of Python, JAX and the
compiler.
"""


def write_page(outcomes: Sequence[Outcome], missing: Sequence[str]) -> str:
    """The page as Markdown; `missing` are faults of the table that this measurement left out."""
    done = [outcome for outcome in outcomes if outcome.result != "not run"]
    failed = [outcome for outcome in done if outcome.result == "failed"]
    processor = platform.processor() or platform.machine()
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [INTRODUCTION.format(steps=STEPS, every=EVERY, limit=LIMIT)]
    lines.append(
        f"Measured on {day} on {os.cpu_count()} cores ({processor}), which other work used at the same time: "
        f"{len(done)} faults, {len(done) - len(failed)} with the stated outcome, {len(failed)} without, "
        f"{sum('hung' in problem for outcome in done for problem in outcome.problems)} hung.\n"
    )
    for group in dict.fromkeys(outcome.group for outcome in done):
        lines += _table(group, [outcome for outcome in done if outcome.group == group])
    lines += _lists(failed, [outcome for outcome in outcomes if outcome.result == "not run"], missing)
    return "\n".join(lines)


def _table(group: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"## {group[0].upper()}{group[1:]}\n"
    yield "| fault | injected | noticed | status | continues | steps lost | first new step | losses |"
    yield "|---|---|--:|--:|---|--:|--:|---|"
    for one in outcomes:
        equal = {True: "equal", False: "**differ**", None: "-"}[one.equal]
        cells = [
            one.name + (" (**not as stated**)" if one.result == "failed" else ""), one.how, _seconds(one.detected_s),
            "-" if one.status is None else str(one.status), one.restart or "-",
            "-" if one.steps_lost is None else str(one.steps_lost), _seconds(one.first_step_s), equal,
        ]  # fmt: skip
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    messages = [one for one in outcomes if one.message.startswith("jaxtrain: ") and one.status]
    if messages:
        yield "\nMessages:\n"
        yield from (f"- {one.name}: `{_short(one.message)}`" for one in messages)
    yield ""


def _lists(failed: Sequence[Outcome], left_out: Sequence[Outcome], missing: Sequence[str]) -> Iterator[str]:
    if failed:
        yield "## Not as stated\n"
        yield from (f"- {one.name}: {'; '.join(_short(problem) for problem in one.problems)}" for one in failed)
        yield ""
    yield "## Not run\n"
    yield from (f"- {one.group}: {one.name}: {one.message}" for one in left_out)
    yield from (f"- {name}: left out of this measurement for lack of time" for name in missing)
    if not left_out and not missing:
        yield "Every fault of the table was run."
    yield ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _short(text: str) -> str:
    """A message without the folders of this machine, in one line."""

    text = " ".join(text.split())
    text = re.sub(r"(/[\w.-]+)+/(?=runs/)", "", text.replace("`", "'"))
    text = re.sub(r"/[\w./-]*/(?=[\w.-]+)", "", text)
    return text.removeprefix("jaxtrain: ")[:220]
