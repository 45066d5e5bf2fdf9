"""What must hold after a fault, beyond losses and statuses: None, or what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from faults import actions as a
from faults.fault import Scene
from faults.runs import read_events


def no_failures(scene: Scene) -> str | None:
    """The supervisor must not have restarted anything."""
    kinds = [event["kind"] for event in read_events(scene.run)]
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
    """A diverged run has no summary, and what it exports is refused or finite."""
    if (scene.run / "summary.json").exists():
        return "a diverged run has a summary"
    new = Path(f"{scene.run}.exported")
    a.beside("export-hf", "{run}", str(new), statuses=(0, 1, 2, 3))(scene)
    for path in new.glob("*.safetensors"):
        for name, array in load_file(path).items():
            if not np.isfinite(array).all():
                return f"exported {name} is not finite"
    return None


def spikes_met(scene: Scene) -> str | None:
    """The run has met spikes."""
    kinds = [event["kind"] for event in read_events(scene.run)]
    return None if "spike" in kinds else "no spike was met"
