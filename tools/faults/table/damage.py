"""Checkpoints that are not what was saved."""

from __future__ import annotations

from typing import Any

from faults import actions as a
from faults.fault import Fault


def damages() -> list[Fault]:
    """Checkpoints that are not what was saved."""
    resumes: dict[str, Any] = {"begin": "interrupted", "detect": "checkpoint (9|10) .*damaged"}
    flips = [
        Fault(f"one flipped bit: {kind}", f"one bit of {file} of step 9", before=a.flip(kind), older=True, **resumes)
        for kind, file in a.KINDS.items()
    ]
    flips.append(
        Fault(
            "one flipped bit in every data file",
            "all of state/ocdbt.process_0/d",
            before=a.flip_every("array data"),
            older=True,
            **resumes,
        )
    )
    truncated = [
        Fault(f"truncated: {kind}", f"half of {a.KINDS[kind]}", before=a.truncate(kind), older=True, **resumes)
        for kind in ("record", "tree of the state", "manifest of a process", "merged manifest", "array data")
    ]
    missing = [
        Fault(f"missing: {kind}", f"{a.KINDS[kind]} removed", before=a.remove(kind), older=True, **resumes)
        for kind in ("record", "tree of the state", "merged manifest", "array data")
    ]
    folders = [
        Fault(
            f"missing folder: {name}",
            f"{name} of step 9 removed",
            before=a.remove_in_checkpoint(name),
            older=True,
            **resumes,
        )
        for name in (".", "state", "record", "state/ocdbt.process_0")
    ]
    other = [
        Fault(
            "an empty folder as the newest checkpoint",
            "checkpoints/10 is an empty folder",
            before=lambda scene: (scene.run / "checkpoints" / "10").mkdir(),
            older=True,
            **resumes,
        ),
        Fault("stale temporary folders", "12.tmp and 3.removed of killed processes", before=a.stale_folders, **resumes),
        Fault(
            "a foreign file among the checkpoints",
            "checkpoints/notes.txt",
            before=a.write("checkpoints/notes.txt", b"x"),
            **resumes,
        ),
    ]
    return flips + truncated + missing + folders + other
