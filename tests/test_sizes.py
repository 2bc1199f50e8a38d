"""Numbers of bytes, for people."""

from __future__ import annotations

import pytest

from lightning_embrace.sizes import human_bytes

BINARY = ("bytes", "KiB", "MiB", "GiB")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234567, "1.23 MB"),
        (999_700, "1000 kB"),
        (150e6, "150 MB"),
        (1.5e9, "1.5 GB"),
        (5e13, "50,000 GB"),
    ],
)
def test_decimal(count: float, shown: str) -> None:
    assert human_bytes(count) == shown


def test_four_digits_have_no_exponent() -> None:
    """Regression: 1,010 KiB were shown as 1.01e+03 KiB."""
    assert human_bytes(1010 << 10, 1024, BINARY) == "1010 KiB"
    assert human_bytes(4 << 30, 1024, BINARY) == "4 GiB"
