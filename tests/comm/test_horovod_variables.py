"""What each rank is told of where it is: what ``horovodrun`` would say."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_embrace.comm.horovod_variables import (
    address_towards,
    check_host_name,
    interface_towards,
    of_place,
    places,
    resolved,
    set_for_a_while,
    settings,
    under_mpi,
)

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(HOSTS)
def test_places(hosts: list[str]) -> None:
    """On each host the local ranks count up from 0, and so do the cross ranks of each local rank."""
    found = places(hosts)
    for host in set(hosts):
        mine = [p for p in found if p.host == host]
        assert [p.local_rank for p in mine] == list(range(hosts.count(host)))
        assert {p.local_size for p in mine} == {hosts.count(host)}
    for local in {p.local_rank for p in found}:
        mine = [p for p in found if p.local_rank == local]
        assert [p.cross_rank for p in mine] == list(range(len(mine)))
        assert {p.cross_size for p in mine} == {len(mine)}


def test_variables_of_a_place() -> None:
    told = of_place(3, places(["a", "a", "b", "b"]), "10.0.0.1", 29, "eth7")
    assert {name.removeprefix("HOROVOD_"): value for name, value in told.items()} == {
        "RANK": "3",
        "SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "HOSTNAME": "b",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "GLOO_RENDEZVOUS_PORT": "29",
        "GLOO_IFACE": "eth7",
    }
    assert "HOROVOD_GLOO_IFACE" not in of_place(0, places(["a"]), "10.0.0.1", 29, None)


def test_settings_are_the_users_where_he_has_made_them() -> None:
    ours = settings(timedelta(minutes=3), "/t.json", {})
    assert ours["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "180" and ours["HOROVOD_TIMELINE"] == "/t.json"
    assert 1 < float(ours["HOROVOD_CYCLE_TIME"]) <= 10
    theirs = {name: "7" for name in ours}
    assert settings(timedelta(minutes=3), "/t.json", theirs) == theirs
    assert "HOROVOD_TIMELINE" not in settings(timedelta(minutes=3), None, {})
    assert settings(timedelta(milliseconds=1), None, {})["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "1"  # 0 is for ever


@pytest.mark.parametrize(
    ("gloo", "controller", "expected"),
    [(True, None, False), (True, "gloo", False), (True, "MPI", True), (False, None, True)],
)
def test_under_mpi(gloo: bool, controller: str | None, expected: bool) -> None:
    assert under_mpi(gloo, {} if controller is None else {"HOROVOD_CONTROLLER": controller}) is expected


def test_variables_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that this process starts must not believe that horovodrun has."""
    monkeypatch.setenv("HOROVOD_SIZE", "before")
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    with contextlib.suppress(KeyError), set_for_a_while({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}):
        assert (os.environ["HOROVOD_SIZE"], os.environ["HOROVOD_RANK"]) == ("2", "1")
        raise KeyError
    assert os.environ["HOROVOD_SIZE"] == "before" and "HOROVOD_RANK" not in os.environ


def test_the_interface_towards_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's word first; on one host, loopback will do."""
    for name in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("psutil")
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1", 1) == "lo"
    assert interface_towards("127.0.0.1", 2) != "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth5,eth6")
    assert interface_towards("127.0.0.1", 1) == "eth5"
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth4")
    assert interface_towards("127.0.0.1", 1) == "eth4"


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", None])
def test_a_host_name_that_means_loopback(address: str | None) -> None:
    """As Debian's installer leaves it. On one host it does no harm."""
    check_host_name(1, "node7", address)
    check_host_name(2, "node7", "10.0.0.7")
    with pytest.raises(RuntimeError, match="/etc/hosts"):
        check_host_name(2, "node7", address)


def test_names_that_resolve() -> None:
    assert resolved("127.0.0.1") == "127.0.0.1" and resolved("no.such.host.invalid") is None
