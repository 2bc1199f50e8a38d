"""The plan of an emulated cluster, literally: which commands, which names, whose leftovers are removed."""

import pytest

from examples.benchmarks import netplan
from examples.benchmarks.netplan import Link, Names, Owner

NAMES = Names(Owner(pid=4321, started=987), serial=2)
OTHER = Names(Owner(pid=432, started=5), serial=0)


def lines(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def test_building_two_ranks_of_different_speed() -> None:
    """Each direction of each link is shaped, where it is sent; all inside namespaces of the cluster."""
    switch, first, second = ("embrace-4321-987-2-" + part for part in ("switch", "rank0", "rank1"))
    assert lines(netplan.building(NAMES, [Link(10**9), Link(10**8)])) == [
        f"ip netns add {switch}",
        f"ip -n {switch} link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"ip -n {switch} link set br0 addrgenmode none up",
        f"ip netns add {first}",
        f"ip -n {switch} link add port0 type veth peer name eth0 netns {first}",
        f"ip -n {switch} link set port0 master br0 addrgenmode none gso_max_size 56250 up",
        f"ip -n {first} link set lo up",
        f"ip -n {first} addr add 10.77.0.1/24 dev eth0",
        f"tc -n {first} qdisc add dev eth0 root handle 1: tbf rate 1000000000bit burst 62500 limit 16000000",
        f"tc -n {switch} qdisc add dev port0 root handle 1: tbf rate 1000000000bit burst 62500 limit 16000000",
        f"ip -n {first} link set eth0 addrgenmode none gso_max_size 56250 up",
        f"ip netns add {second}",
        f"ip -n {switch} link add port1 type veth peer name eth0 netns {second}",
        f"ip -n {switch} link set port1 master br0 addrgenmode none gso_max_size 5625 up",
        f"ip -n {second} link set lo up",
        f"ip -n {second} addr add 10.77.0.2/24 dev eth0",
        f"tc -n {second} qdisc add dev eth0 root handle 1: tbf rate 100000000bit burst 6250 limit 16000000",
        f"tc -n {switch} qdisc add dev port1 root handle 1: tbf rate 100000000bit burst 6250 limit 16000000",
        f"ip -n {second} link set eth0 addrgenmode none gso_max_size 5625 up",
    ]


@pytest.mark.parametrize(
    ("link", "commands"),
    [
        (Link(None), []),
        (Link(None, 0.001), ["root handle 2: netem delay 1000us limit 10568"]),
        (
            Link(10**8, 0.0002),
            [
                "root handle 1: tbf rate 100000000bit burst 6250 limit 16000000",
                "parent 1:1 handle 2: netem delay 200us limit 10568",
            ],
        ),
    ],
)
def test_shaping(link: Link, commands: list[str]) -> None:
    """A delay stands inside the rate limit; a link without a rate has none."""
    assert lines(netplan.shaping("ns", "dev", link)) == [f"tc -n ns qdisc add dev dev {rest}" for rest in commands]


@pytest.mark.parametrize("rate", [10**3, 10**6, 10**7, 5 * 10**7, 10**8, 10**9, 10**10, 10**11])
def test_a_packet_fits_in_the_burst_with_the_headers_of_all_its_frames(rate: int) -> None:
    """Else the shaper cuts packets up, frame by frame, which costs the CPU that the ranks need."""
    link = Link(rate)
    frames = -(-link.gso // 1448)
    assert link.gso + 66 * frames <= link.burst
    assert 1514 <= link.gso <= 65536


def test_names_lead_back_to_their_cluster() -> None:
    for name in (NAMES.switch, NAMES.rank(0), NAMES.rank(15), NAMES.folder):
        assert netplan.names_of(name) == NAMES


@pytest.mark.parametrize(
    "foreign",
    ["embrace", "embrace-1-2-3", "embrace-1-2-3-rank", "my-embrace-1-2-3-rank0", "embrace-1-2-x-switch", "vpn", ""],
)
def test_namespaces_of_others_are_never_ours(foreign: str) -> None:
    """Whatever is recognised will be removed."""
    assert netplan.names_of(foreign) is None
    assert netplan.stale_clusters([foreign], alive=[]) == []


def test_only_clusters_of_dead_owners_are_stale() -> None:
    namespaces = [NAMES.switch, NAMES.rank(0), OTHER.switch, OTHER.rank(0), "vpn"]
    assert netplan.stale_clusters(namespaces, alive=[NAMES.owner, OTHER.owner]) == []
    assert netplan.stale_clusters(namespaces, alive=[NAMES.owner]) == [OTHER]
    assert netplan.stale_clusters(namespaces, alive=[]) == [OTHER, NAMES]


def test_a_reused_pid_does_not_keep_a_dead_owner_alive() -> None:
    assert netplan.stale_clusters([NAMES.switch], alive=[Owner(4321, started=988)]) == [NAMES]


def test_a_cluster_takes_none_of_its_neighbours_along() -> None:
    """Pids and serials that begin alike: 432 and 4321, 2 and 20."""
    neighbours = [OTHER.switch, Names(NAMES.owner, 20).switch, "embrace-4321-98-2-switch"]
    assert netplan.belonging_to(NAMES, [*neighbours, NAMES.rank(1), NAMES.switch]) == [NAMES.rank(1), NAMES.switch]


def test_start_of_a_process_whose_name_is_made_to_confuse() -> None:
    stat = "7 (a) R 1 2) S 1 7 7 0 -1 4194560 176 0 1 0 5 6 7 8 20 0 3 0 123456 3022848 400 18446744073709551615"
    assert netplan.started_at(stat) == 123456
    assert netplan.started_at(stat.replace(") S ", ") Z ")) is None, "it has ended, though its parent does not know yet"


def test_addresses_stay_in_one_network() -> None:
    every = [netplan.address(rank) for rank in range(netplan.MAX_RANKS)]
    assert every[0] == "10.77.0.1" and every[-1] == "10.77.0.64" and len(set(every)) == netplan.MAX_RANKS


def test_entering_and_removing() -> None:
    assert netplan.entering("ns", ["python", "-c", "1"]) == ["ip", "netns", "exec", "ns", "python", "-c", "1"]
    assert netplan.removing("ns") == ["ip", "netns", "del", "ns"]
