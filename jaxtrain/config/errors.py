"""The exception for what a user can fix, and the nearest name for its message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting is wrong; the message names the setting, its value and the fix."""


def nearest(word: str, words: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest of `words`, or the empty string."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
