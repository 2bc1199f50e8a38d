"""Rates and delays as users write them, and what is refused rather than guessed."""

import pytest

from examples.benchmarks.rates import bytes_per_second, parse_delay, parse_rate, per_rank, show_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 1_000_000_000),
        ("100mbit", 100_000_000),
        ("2.5 Gbit/s", 2_500_000_000),
        (" 50Mbit ", 50_000_000),
        (".5kbit", 500),
        ("64000bit", 64_000),
        ("none", None),
    ],
)
def test_rates(text: str, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    "text", ["100mb", "100mbps", "100", "", "fast", "-1mbit", "0mbit", "1e9bit", "100mbit; reboot"]
)
def test_what_may_mean_bytes_or_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="A rate was asked for"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.2ms", 0.0002), ("50us", 0.00005), ("1 s", 1.0), ("0", 0.0), ("0ms", 0.0)]
)
def test_delays(text: str, seconds: float) -> None:
    assert parse_delay(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["1", "", "ms", "1min", "-1ms", "1ms/s"])
def test_a_delay_needs_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match="A delay was asked for"):
        parse_delay(text)


def test_one_value_counts_for_all_ranks() -> None:
    assert per_rank("1gbit", 3, "rate") == ["1gbit"] * 3
    assert per_rank(["1gbit"], 2, "rate") == ["1gbit"] * 2
    assert per_rank(["1gbit", "2gbit"], 2, "rate") == ["1gbit", "2gbit"]
    with pytest.raises(ValueError, match="3 ranks but 2 values of rate"):
        per_rank(["1gbit", "2gbit"], 3, "rate")


def test_the_bound_uses_the_slowest_link() -> None:
    assert bytes_per_second("80mbit") == 10_000_000
    assert bytes_per_second(["1gbit", "80mbit", "none"]) == 10_000_000
    assert bytes_per_second("none") == 0


def test_shown_rates_read_as_written() -> None:
    shown = [show_rate(rate) for rate in (1e9, 94.21e6, 64_000, 999, None)]
    assert shown == ["1 Gbit/s", "94.21 Mbit/s", "64 kbit/s", "999 bit/s", "not shaped"]
