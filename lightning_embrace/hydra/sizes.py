"""Sizes as people write them."""

from __future__ import annotations

import re

from lightning_embrace.memory import UNKNOWN, available_bytes
from lightning_embrace.sizes import human_bytes

#: of :func:`usable_bytes`, for what waits in host memory, where nothing was said
HOST_SHARE = 0.5
#: where the system does not say what there is
_USUAL = 8 << 30

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}iB"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(name: str, value: int | str, owner: str = "HydraStrategy") -> int:
    """``"4GiB"`` → 4294967296; a number is bytes.

    Args:
        name: The argument, for the error.
        value: What was given.
        owner: Whose argument.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: It is no size.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = next((u for u in _UNITS if match and u.lower() == match[2].lower()), None)
        if match and unit is not None and (size := int(float(match[1]) * _UNITS[unit])) > 0:
            return size
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError(f"{owner}({name}={value!r}): give bytes, or a size such as '4GiB' or '500MB'.")


def human(count: float) -> str:
    """``1234567`` → ``"1.18 MiB"``: in the units in which budgets are given."""
    return human_bytes(count, 1024, ("B", "KiB", "MiB", "GiB"))


def usable_bytes() -> int:
    """What this process may use of the machine's memory; 8 GiB where the system does not say."""
    available = available_bytes()
    return _USUAL if available == UNKNOWN else available
