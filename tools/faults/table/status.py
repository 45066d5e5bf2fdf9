"""Exit statuses of commands, and plants that many faults share."""

KILLED, STOPPED, FAILED, STUCK, DIVERGED, STORAGE, REFUSED = 137, 75, 13, 14, 3, 74, 2
SLOW = {"pause": 0.1}
"""Steps of a tenth of a second, so that a signal meets a step."""
WATCHED = ("watchdog.floors={step: 3, input: 3, checkpoint: 10, evaluation: 10}",)
"""Seconds after which a rank of the tiny model is stuck."""
