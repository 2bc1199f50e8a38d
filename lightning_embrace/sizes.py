"""Numbers of bytes, for people."""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(count: float, step: int = 1000, units: Sequence[str] = ("B", "kB", "MB", "GB")) -> str:
    """``1234567`` → ``"1.23 MB"``.

    Args:
        count: Bytes.
        step: How many of a unit make the next one.
        units: The units.
    """
    *smaller, largest = units
    for unit in smaller:
        if abs(count) < step:
            # three digits and no exponent: 1,000 to 1,023 KiB have four
            return f"{count:.0f} {unit}" if unit == units[0] or abs(count) >= 100 else f"{count:.3g} {unit}"
        count /= step
    return f"{count:,.0f} {largest}" if abs(count) >= 100 else f"{count:.3g} {largest}"
