"""What the processes of a job must have in common, compared through the coordination service before they compute.

A process with another setting, other code, another corpus or another run directory would train on, or hang.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.launch.coordination import combine, exchange, process_name, rank_and_count, wait_for_all

NFS_S = 30.0
"""Seconds after which a file that another host wrote is expected on a network file system that caches directories."""
SHOWN = 8
"""Differences, and processes of a difference, that a message lists."""


def agree(name: str, facts: Mapping[str, Any], fix: str, timeout: float = 300.0) -> None:
    """Compare {setting: JSON value} of all processes; every process calls it with the same `name`.

    On every process: ConfigError naming the settings and the processes that differ, ending in `fix`; AbsentError like
    `coordination.exchange`.
    """
    if rank_and_count()[1] == 1:
        return
    differing: list[str] = combine(name, dict(facts), lambda all_facts: differences(all_facts, process_name), timeout)
    if differing:
        rest = f"\n  and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        lines = "".join(f"\n  {line}" for line in differing[:SHOWN])
        raise ConfigError(f"the processes of this job disagree ({name}):{lines}{rest}\n{fix}")


def differences(all_facts: Sequence[Mapping[str, Any]], name_of: Callable[[int], str]) -> list[str]:
    """One line per key whose value is not the same on all processes; the processes in the minority come first."""
    lines = []
    for key in dict.fromkeys(key for facts in all_facts for key in facts):
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(all_facts):
            groups[json.dumps(facts[key], sort_keys=True) if key in facts else "unset"].append(rank)
        if len(groups) > 1:
            # The smallest group is the odd one out; of two equal ones, that without process 0.
            ordered = sorted(groups.items(), key=lambda group: (len(group[1]), 0 in group[1]))
            shown = [f"{value} on {_name_ranks(ranks, name_of)}" for value, ranks in ordered]
            lines.append(f"{key} is {', '.join(shown)}")
    return lines


def agree_on_directory(directory: Path) -> None:
    """Check that `directory` is one and the same on all processes, and holds the same checkpoint steps for each.

    The directory need not exist; a file with a random name is written for a moment beside or in it. Raises ConfigError
    on every process, naming those that see another directory.
    """
    rank, processes = rank_and_count()
    if processes == 1:
        return
    directory = Path(os.path.abspath(directory))
    mark, depth, failure = None, 0, None
    # A process that still looks whether the directory is empty must not find the mark.
    wait_for_all("run directory checked")
    if rank == 0:
        try:
            mark, depth = _write_mark(directory)
        except OSError as error:
            failure = f"{directory} cannot be written ({error.strerror or error})"
    try:
        said = {
            "mark": mark and mark.name,
            "depth": depth,
            "path": str(directory),
            "steps": checkpoint_steps(directory),
        }
        primary = exchange("run directory", {**said, "failure": failure})[0]
        if primary["failure"]:
            raise ConfigError(f"{primary['failure']}: name another --run, or permit writing")
        problem = "" if rank == 0 else _compare(directory, primary)
        problems = exchange("run directory seen", problem, 300.0 + NFS_S)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    lines = [f"\n  {process_name(i)} {text}" for i, text in enumerate(problems) if text]
    if lines:
        rest = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise ConfigError(
            f"the processes of this job do not share one run directory, {process_name(0)} has {primary['path']}:"
            f"{''.join(lines[:SHOWN])}{rest}\nname the same --run everywhere, on storage that every host mounts"
        )


def _write_mark(directory: Path) -> tuple[Path, int]:
    """A fresh file in the nearest existing folder, and how many parts of the path are missing below that folder."""
    for depth, folder in enumerate([directory, *directory.parents]):
        if folder.is_dir():
            mark = folder / f".jaxtrain-{uuid.uuid4().hex}"
            mark.touch()
            return mark, depth
    raise OSError(f"no folder above {directory} exists")


def _compare(directory: Path, primary: Mapping[str, Any]) -> str:
    """How this process's view differs from that of process 0, empty if it does not."""
    depth, path = primary["depth"], Path(primary["path"])
    # Below the marked folder the paths must be equal; above it, hosts may mount it elsewhere.
    tail = directory.parts[len(directory.parts) - depth :] == path.parts[len(path.parts) - depth :]
    folder = directory.parents[depth - 1] if depth else directory
    # Another path is another directory as soon as the mark is not seen; under the same path a cache may be behind.
    deadline = time.monotonic() + (NFS_S if directory == path else 1.0)
    while True:
        seen, steps = tail and primary["mark"] in _names(folder), checkpoint_steps(directory)
        if seen and steps == primary["steps"]:
            return ""
        if time.monotonic() >= deadline or not tail:
            break
        time.sleep(0.1)
    if seen:
        return f"sees the checkpoints {steps or 'none'}, process 0 {primary['steps'] or 'none'}"
    return f"has {directory}" + (", which is not the same directory" if directory == path else "")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps whose checkpoints this process sees in a run directory."""
    return sorted(int(name) for name in _names(directory / "checkpoints") if name.isdecimal())


def _name_ranks(ranks: Sequence[int], name_of: Callable[[int], str]) -> str:
    names = ", ".join(name_of(rank) for rank in ranks[: min(len(ranks), SHOWN // 2)])
    more = len(ranks) - SHOWN // 2
    return f"{names} and {more} more" if more > 0 else names
