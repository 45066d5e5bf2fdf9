"""Reference implementations on demand: tests and `verify` compare every faster implementation with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_REFERENCE: ContextVar[bool] = ContextVar("jaxtrain_reference", default=False)


@contextmanager
def use_reference() -> Iterator[None]:
    """While tracing here, compute attention as one dense softmax and a mixture as a loop over its experts."""
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


def uses_reference() -> bool:
    """Whether reference implementations are in use here."""
    return _REFERENCE.get()
