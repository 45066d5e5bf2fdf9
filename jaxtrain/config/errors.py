"""Exceptions that end a command with one message and a documented exit status; the nearest name for a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class ConfigError(ValueError):
    """A setting is wrong; the message names the setting, its value and the fix. Exit status 2."""

    status: ClassVar[int] = 2


class RunError(Exception):
    """A run ended for a reason that is no wrong setting; the message says what happened and what to do."""

    status: ClassVar[int] = 1


class DivergedError(RunError):
    """Loss, gradients or state are not finite and skipping did not help: the same command would diverge again."""

    status: ClassVar[int] = 3


class CorruptionError(RunError):
    """A device computed other bits for the same inputs, or holds other bits than its replicas."""

    status: ClassVar[int] = 4


class StorageError(RunError):
    """Files cannot be read or written: a full disk, a lost permission, a file system that went away."""

    status: ClassVar[int] = 74


class StoppedError(RunError):
    """A signal stopped the run after it saved a checkpoint: the same command resumes it."""

    status: ClassVar[int] = 75


def nearest(word: str, words: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest of `words`, or the empty string."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
