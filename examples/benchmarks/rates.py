"""Rates and delays as a user writes them: ``"100mbit"``, ``"0.2ms"``."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)(/s)?\s*", re.IGNORECASE)
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> int | None:
    """Bits per second of ``"100mbit"``, ``"2.5 Gbit/s"``; ``None`` for ``"none"``, a link that is not shaped.

    Units are decimal, as ``tc`` has them. What could mean bytes as well (``"100mb"``, ``"100mbps"``, ``"100"``) is
    refused.
    """
    if text.strip().lower() == "none":
        return None
    match = _NUMBER_AND_UNIT.fullmatch(text)
    unit = match[2].lower() if match else ""
    bits = round(float(match[1]) * _BITS[unit]) if match and unit in _BITS else 0
    if bits <= 0:
        raise ValueError(f"A rate was asked for, got {text!r}. Write for example 100mbit, 2.5gbit, or none.")
    return bits


def parse_delay(text: str) -> float:
    """Seconds of ``"0.2ms"``, ``"50us"``, ``"1s"`` or ``"0"``."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match and not match[3]:
        if match[2].lower() in _SECONDS:
            return float(match[1]) * _SECONDS[match[2].lower()]
        if not match[2] and float(match[1]) == 0:
            return 0.0
    raise ValueError(f"A delay was asked for, got {text!r}. Write for example 0.2ms, 50us, or 0.")


def per_rank(given: str | Sequence[str], ranks: int, what: str) -> list[str]:
    """One value for each rank: a single one counts for all."""
    values = [given] * ranks if isinstance(given, str) else list(given)
    if len(values) == 1:
        values = values * ranks
    if len(values) != ranks:
        raise ValueError(f"{ranks} ranks but {len(values)} values of {what}: {values}. Write one, or one per rank.")
    return values


def bytes_per_second(rate: str | Sequence[str]) -> float:
    """Bytes per second of the slowest of the links; 0 when none is shaped."""
    rates = [parse_rate(text) for text in ([rate] if isinstance(rate, str) else rate)]
    return min((bits / 8 for bits in rates if bits is not None), default=0.0)


def show_rate(bits_per_s: float | None) -> str:
    """``"100 Mbit/s"``."""
    if bits_per_s is None:
        return "not shaped"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.4g} {unit}"
    return f"{bits_per_s:.4g} bit/s"
