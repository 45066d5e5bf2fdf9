"""Plain mathematics on demand: what a proof compares every faster way with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PLAIN: ContextVar[bool] = ContextVar("jaxtrain_plain", default=False)


@contextmanager
def use_reference() -> Iterator[None]:
    """While tracing here, attention is one dense softmax and a mixture a loop over its experts."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def uses_reference() -> bool:
    """Whether plain mathematics was asked for."""
    return _PLAIN.get()
