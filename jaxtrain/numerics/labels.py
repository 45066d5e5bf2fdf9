"""The label value that the loss leaves out."""

from __future__ import annotations

IGNORE = -1
"""Label of a position that is not scored."""
