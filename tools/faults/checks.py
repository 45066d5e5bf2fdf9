"""What must hold after a fault, beyond losses and statuses: None, or what is wrong."""

from __future__ import annotations

import json

from faults import actions as a
from faults.fault import Scene


def no_failures(scene: Scene) -> str | None:
    """The supervisor must not have restarted anything."""
    path = scene.run / "events.jsonl"
    kinds = [json.loads(line).get("kind") for line in path.read_text().splitlines()] if path.exists() else []
    return "the supervisor recorded a failure" if "failure" in kinds else None


def lost_nothing(scene: Scene) -> str | None:
    """After a signal the run resumes where it stopped."""
    assert scene.job is not None
    return None if "resumed at step" in scene.job.text else "nothing was saved at the signal"


def none_condemned(scene: Scene) -> str | None:
    """A read error is no damage: no checkpoint is renamed."""
    renamed = [path.name for path in (scene.run / "checkpoints").iterdir() if "damaged" in path.name]
    return f"renamed as damaged after read errors: {', '.join(renamed)}" if renamed else None


def nothing_published(scene: Scene) -> str | None:
    """A diverged run has no summary of success, and export refuses it."""
    try:
        a.beside("export-hf", "{run}", "{new}", statuses=(1, 2, 3))(scene)
    except AssertionError as error:
        return str(error)
    return None
