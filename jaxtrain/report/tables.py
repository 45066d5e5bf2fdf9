"""Numbers as text, for all tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(n: int) -> str:
    """Bytes in decimal units: GB is 10^9 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def gib(size: float) -> str:
    """Bytes as GiB, without the unit."""
    return f"{size / 2**30:.2f}"


def percent(share: float) -> str:
    """A share as percent."""
    return f"{share * 100:.0f}%"


def format_integer(value: float) -> str:
    """A count."""
    return str(int(value))


def format_number(value: float) -> str:
    """Three decimals below 10, one above."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def format_range(numbers: Sequence[int]) -> str:
    """'0-7' for consecutive numbers, else all of them."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
