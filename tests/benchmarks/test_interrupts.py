"""Signals while something must be finished."""

import signal

import pytest

from examples.benchmarks.interrupts import SignalsRaise, undisturbed


def test_what_comes_meanwhile_acts_afterwards() -> None:
    """A second Ctrl-C must not stop a clean-up half-way, nor get lost."""
    done: list[str] = []

    def clean_up() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        clean_up()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_is_seen() -> None:
    with pytest.raises(ValueError, match="lost"), undisturbed():
        raise ValueError("lost")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ending_signals_become_exceptions(number: signal.Signals) -> None:
    signals = SignalsRaise()
    signals.start()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(number)
    signals.stop()
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_handler_of_someone_else_stays() -> None:
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals = SignalsRaise()
    signals.start()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signals.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, previous)
