"""The control channel with all ranks in one process."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_embrace.comm.control import Control, Hub, RankFailedError
from lightning_embrace.comm.control_wire import listen_on

SOON = 10.0  # generous, for machines under load: reached only by a test that fails
A_WHILE = 0.3  # how long we look for what must not happen


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(3)
    yield hub
    hub.close()


@pytest.fixture
def ranks(hub: Hub) -> Iterator[list[Control]]:
    controls = [Control(0, 3, hub=hub), *(Control(rank, 3, port=hub.port, token=hub.token) for rank in (1, 2))]
    yield controls
    for control in reversed(controls):
        control.close()


def framed(message: object) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_embrace")]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_report_reaches_all_others_by_name(
    ranks: list[Control], failing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every other rank raises with rank, step, exchange and reason, and each has written one line to stderr."""
    ranks[failing].at_step(3)
    ranks[failing].at("rows (round 2)")
    ranks[failing].report(ValueError("boom\nand more"))
    others = [control for control in ranks if control.rank != failing]
    for control in others:
        failure = control.wait_for_failure(SOON)
        assert failure is not None
        assert (failure.rank, failure.step, failure.exchange) == (failing, 3, "rows (round 2)")
        assert str(failure) == (
            f"rank {failing} failed at step 3, in or after exchange 'rows (round 2)': ValueError: boom\nand more"
        )
        with pytest.raises(RankFailedError, match="boom"):
            control.check()
    assert ranks[failing].failure is None
    ranks[failing].check()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == [
        f"[lightning_embrace] rank {control.rank}: rank {failing} failed at step 3, in or after exchange "
        "'rows (round 2)': ValueError: boom and more"
        for control in others
    ]


def test_the_report_is_out_when_it_returns(ranks: list[Control]) -> None:
    """A rank may be killed right after reporting: by then the hub has passed the failure on."""
    ranks[1].report(ValueError("boom"))
    ranks[1]._wire.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    failure = ranks[2].wait_for_failure(SOON)
    assert failure is not None
    assert "boom" in failure.reason


def test_a_failure_before_the_first_exchange_says_so(ranks: list[Control]) -> None:
    """There is no step to name before the first exchange; neither `None` nor a made-up one is shown."""
    ranks[1].report(KeyboardInterrupt())
    assert str(ranks[0].wait_for_failure(SOON)) == "rank 1 failed before the first exchange: KeyboardInterrupt"


def test_the_first_failure_wins(ranks: list[Control]) -> None:
    """What fails next is most often a consequence, and must not hide the cause."""
    ranks[1].report(ValueError("the cause"))
    for control in (ranks[0], ranks[2]):
        assert control.wait_for_failure(SOON) is not None
    ranks[2].report(OSError("connection closed by peer"))
    assert ranks[1].wait_for_failure(A_WHILE) is None
    assert "the cause" in str(ranks[0].failure)


def test_a_consequence_is_not_reported(ranks: list[Control]) -> None:
    """An error raised because of another rank's failure names that rank, even when wrapped."""
    try:
        try:
            raise RankFailedError(1, 3, "rows", "ValueError: boom")
        except RankFailedError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as wrapped:
        ranks[2].report(wrapped)
    assert ranks[0].wait_for_failure(A_WHILE) is None


def test_a_failure_in_another_thread_of_this_rank_is_raised_here_too(ranks: list[Control]) -> None:
    """The training thread may wait for ranks that wait for what that thread was to do: it asks here meanwhile."""
    error = ValueError("boom")
    ranks[1].fail_here(error)
    with pytest.raises(ValueError, match="boom") as caught:
        ranks[1].check()
    assert caught.value is error
    for control in (ranks[0], ranks[2]):
        failure = control.wait_for_failure(SOON)
        assert failure is not None and failure.rank == 1 and "boom" in failure.reason
    consequence = RankFailedError(1, None, None, "boom")
    ranks[0].fail_here(consequence)
    with pytest.raises(RankFailedError, match="rank 1"):
        ranks[0].check()
    ranks[1].fail_here(KeyError("a second one"))
    with pytest.raises(ValueError, match="boom"):
        ranks[1].check()


def test_a_long_or_broken_message_does_not_stop_the_report(ranks: list[Control]) -> None:
    """Torch errors can be pages long, and an exception's text can be anything, or raise itself."""

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    ranks[1].at_step(1)
    ranks[1].at("\ud800" * 10_000)
    ranks[1].report(ValueError("\ud800\U0001f600" * 100_000))
    failure = ranks[0].wait_for_failure(SOON)
    assert failure is not None
    assert "\U0001f600" in failure.reason
    ranks[2].report(Broken())


def test_a_lost_connection_is_a_death_and_names_where_we_are(ranks: list[Control]) -> None:
    """A dead rank cannot say where it was: the error names the rank and the exchange in which it is missed."""
    ranks[2].at_step(3)
    ranks[2].at("rows (round 2)")
    ranks[1]._wire.socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    for control in (ranks[0], ranks[2]):
        assert control.wait_for_failure(SOON) is not None
    assert str(ranks[0].failure) == (
        "rank 1 died (its process ended without a word) while this rank was before the first exchange"
    )
    assert str(ranks[2].failure) == (
        "rank 1 died (its process ended without a word) while this rank was at step 3, in or after exchange "
        "'rows (round 2)'"
    )


def test_a_rank_that_has_said_bye_is_not_dead(ranks: list[Control]) -> None:
    """Ranks tear down at different times; the first to go must not fail the others, and these still find each other."""
    ranks[1].close()
    assert ranks[0].wait_for_failure(A_WHILE) is None
    assert ranks[2].failure is None
    ranks[2].report(ValueError("boom"))
    assert ranks[0].wait_for_failure(SOON) is not None


def test_the_hub_may_go_first(ranks: list[Control]) -> None:
    """Rank 0's end takes the hub along: no death for the others, who close without waiting for it."""
    ranks[0].close()
    for control in ranks[1:]:
        assert control.wait_for_failure(A_WHILE) is None
        control.report(ValueError("nobody is left to hear it"))
        began = time.monotonic()
        control.close()
        control.close()
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nothing_is_left_after_closing(ranks: list[Control], order: tuple[int, ...]) -> None:
    """Threads must not pile up over many fits in one process, whoever closes first."""
    for rank in order:
        ranks[rank].close()
    deadline = time.monotonic() + SOON
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert our_threads() == []
    assert [control.failure for control in ranks] == [None] * 3


def test_all_close_at_once(ranks: list[Control]) -> None:
    """The usual end: byes cross each other on the way, and no order of arrival is a death or a long wait."""
    threads = [threading.Thread(target=control.close) for control in ranks]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 1.5
    assert [control.failure for control in ranks] == [None] * 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\x00",
        b"\xff" * 100,
        struct.pack("!I", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("!I", 50_000) + b"[" * 50_000,
        framed([1, 2]),
        framed({"type": "failure", "rank": 1, "reason": "forged"}),
        framed({"type": "bye"}),
        framed({"type": "hello", "rank": 1, "token": 7}),
        framed({"type": "hello", "rank": 1, "token": "\ud800"}),
    ],
    ids=lambda garbage: repr(garbage[:12]),
)
@pytest.mark.parametrize("hangs_up", [True, False])
def test_strangers_are_ignored(hub: Hub, garbage: bytes, hangs_up: bool) -> None:
    """A port scanner or another job's process must not break the hub, fake a failure or take a rank's place."""
    zero = Control(0, 3, hub=hub)
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(garbage)
        if hangs_up:
            stranger.close()
        one = Control(1, 3, port=hub.port, token=hub.token)
        assert zero.failure is None
        one.report(ValueError("boom"))
        failure = zero.wait_for_failure(SOON)
        assert failure is not None
        assert failure.reason == "ValueError: boom"
        one.close()
        zero.close()


@pytest.mark.parametrize(
    ("rank", "token", "why"),
    [
        (2, "wrong", "wrong token"),
        (3, None, "no rank 3"),
        (-1, None, "no rank -1"),
        (1, None, "rank 1 is here already"),
    ],
)
def test_a_wrong_hello_is_refused_by_name(
    ranks: list[Control], hub: Hub, rank: int, token: str | None, why: str
) -> None:
    """Two jobs on one port, or two processes with one rank, are told so; the ranks that are here go on."""
    with pytest.raises(ConnectionError, match=why):
        Control(rank, 3, port=hub.port, token=token or hub.token)
    assert ranks[0].wait_for_failure(A_WHILE) is None


def test_who_joins_late_learns_what_has_failed(hub: Hub) -> None:
    """A rank may fail while another is still starting: the latter must not begin to wait for it."""
    zero = Control(0, 3, hub=hub)
    zero.report(ValueError("boom"))
    late = Control(2, 3, port=hub.port, token=hub.token)
    assert late.wait_for_failure(SOON) is not None
    late.close()
    zero.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_rank_waits_for_the_hub() -> None:
    """With a fixed port a rank may be there before the hub."""
    port = free_port()
    hubs: list[Hub] = []
    later = threading.Timer(0.5, lambda: hubs.append(Hub(2, port=port)))
    later.start()
    with pytest.raises(ConnectionError, match="wrong token"):  # that is an answer: the hub was reached
        Control(1, 2, port=port, token="unknown yet")
    later.join()
    hubs[0].close()


def test_no_hub_is_an_error_within_the_timeout() -> None:
    """A wrong address ends with an error that says which."""
    port = free_port()
    with pytest.raises(ConnectionError, match=f"rank 1 could not reach .* 127.0.0.1:{port}"):
        Control(1, 2, port=port, token="x", connect_timeout=0.3)


def test_a_silent_listener_is_an_error_within_the_timeout() -> None:
    """Something else may listen on the port and never answer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ConnectionError, match="no answer within"),
    ):
        Control(1, 2, port=server.getsockname()[1], token="x", connect_timeout=0.3)


def test_a_hub_that_does_not_answer_holds_nobody_up() -> None:
    """Rank 0 may be stopped or starved: reporting and closing are bounded all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def welcome() -> None:
            connection, _ = server.accept()
            connection.sendall(framed({"type": "welcome"}))
            kept.append(connection)

        kept: list[socket.socket] = []
        threading.Thread(target=welcome).start()
        control = Control(1, 2, port=server.getsockname()[1], token="x")
        began = time.monotonic()
        control.report(ValueError("boom"))
        assert time.monotonic() - began < 2.0
        control.close()
        assert time.monotonic() - began < 5.0
        kept[0].close()


def test_one_rank_needs_no_channel() -> None:
    """World size 1 is no special case for the callers, and costs neither socket nor thread."""
    before = our_threads()
    control = Control(0, 1, hub=Hub(1))
    control.at_step(1)
    control.at("rows")
    control.report(ValueError("boom"))
    control.check()
    assert control.failure is None
    assert control.wait_for_failure(60.0) is None
    assert our_threads() == before
    control.close()


def test_only_rank_0_has_the_hub() -> None:
    """Rank 0 without the hub would wait for itself; another rank with it would speak as rank 0."""
    with pytest.raises(ValueError, match="hub belongs to rank 0"):
        Control(0, 2)


def test_each_raise_is_fresh_and_errors_cross_processes(ranks: list[Control]) -> None:
    """Spawn hands errors to the parent by pickle; one shared error would gather every raiser's traceback."""
    ranks[1].report(ValueError("boom"))
    assert ranks[0].wait_for_failure(SOON) is not None
    raised = []
    for _ in range(2):
        with pytest.raises(RankFailedError) as caught:
            ranks[0].check()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    copy = pickle.loads(pickle.dumps(raised[0]))
    assert (str(copy), copy.rank, copy.died) == (str(raised[0]), 1, False)


def test_a_main_address_decides_where_the_hub_listens() -> None:
    """Loopback jobs are not exposed to the network; any other address must be reachable from other machines.

    That includes the machine's own name, which on Debian is 127.0.1.1 there and something else everywhere else.
    """

    def bound(host: str) -> str:
        with contextlib.closing(listen_on(host, 0, backlog=1)) as listener:
            return str(listener.getsockname()[0])

    assert bound("127.0.0.1") == "127.0.0.1"
    assert bound("localhost") in ("127.0.0.1", "::1")
    for host in (socket.gethostname(), "192.0.2.1"):
        assert bound(host) in ("::", "0.0.0.0")
    with contextlib.suppress(OSError):  # no IPv6 here
        assert bound("::1") == "::1"


@pytest.mark.parametrize("host", ["localhost", "::1", "192.0.2.1"])
def test_ranks_find_the_hub_over_either_protocol(host: str) -> None:
    """IPv6, names and all-interfaces hubs carry a failure like any other."""
    try:
        hub = Hub(2, host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    zero = Control(0, 2, hub=hub)
    reachable = host if host != "192.0.2.1" else "127.0.0.1"
    one = Control(1, 2, reachable, hub.port, hub.token)
    one.report(ValueError("boom"))
    assert zero.wait_for_failure(SOON) is not None
    one.close()
    zero.close()
