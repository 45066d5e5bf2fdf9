"""Losses and states that are not finite, spikes, flipped bits."""

from __future__ import annotations

import signal

from faults import actions as a
from faults.checks import nothing_published, spikes_met
from faults.fault import Fault
from faults.table.status import DIVERGED, KILLED, REFUSED, SLOW


def numbers() -> list[Fault]:
    """Losses and states that are not finite, spikes, flipped bits."""
    return [
        Fault(
            "NaN in some batches",
            "a registered loss is NaN on some batches; SIGKILL after step 8",
            plant=SLOW,
            config={"train": {"loss": "nan_in_some_batches"}},
            when=a.step(8),
            do=a.send(signal.SIGKILL),
            status=(KILLED,),
        ),
        *(
            Fault(
                f"loss spikes, {action}",
                f"a loss that is 1,000 times as large on some batches; guard.spike 20, guard.action {action}; SIGKILL",
                config={
                    "train": {"loss": "spikes", "steps": 24},
                    "optimizer": {"total": 24},
                    "guard": {"spike": 20, "window": 8, "action": action},
                },
                plant=SLOW,
                when=a.step(19),
                do=a.send(signal.SIGKILL),
                status=(KILLED,),
                check=spikes_met,
            )
            for action in ("skip", "rollback")
        ),
        Fault(
            "a flipped bit in a parameter",
            "one bit of one parameter in the memory of rank 1 of 2 at step 5; guard.replay_every 1",
            processes=2,
            overrides=("guard.replay_every=1",),
            plant={**SLOW, "what": "flip", "step": 5, "rank": 1},
            says="embed",
        ),
        Fault(
            "NaN in every batch",
            "a registered loss is always NaN",
            equal=False,
            rerun=False,
            status=(DIVERGED,),
            config={"train": {"loss": "nan_in_every_batch"}, "precision": {"max_skipped": 3}},
            check=nothing_published,
        ),
        Fault(
            "learning rate that overflows",
            "optimizer.learning_rate 1e38",
            equal=False,
            rerun=False,
            status=(DIVERGED,),
            config={"optimizer": {"learning_rate": 1e38, "warmup": 0}, "precision": {"max_skipped": 3}},
            check=nothing_published,
        ),
        Fault(
            "infinite learning rate",
            "optimizer.learning_rate inf",
            equal=False,
            rerun=False,
            status=(REFUSED,),
            overrides=("optimizer.learning_rate=inf",),
            says="optimizer.learning_rate",
        ),
        Fault(
            "float16 with a scale that is too high",
            "precision.scale_init 1e30, max_skipped 5",
            equal=False,
            rerun=False,
            status=(DIVERGED, REFUSED),
            says="precision.scale_init",
            config={"precision": {"compute": "float16", "scale_init": 1e30, "scale_max": 1e31, "max_skipped": 5}},
        ),
    ]
