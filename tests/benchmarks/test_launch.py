"""The launcher, on loopback: what a rank finds, and that none outlives its run."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.benchmarks import host, launch
from examples.benchmarks.cluster import Cluster, RanksFailed, check, main, run_ranks

ROOT = Path(__file__).resolve().parents[2]
# a child that leaves its process group, and would sleep on
RUNAWAY = "setsid sleep 300 & "


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2, kind="loopback") as two:
        yield two


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def said(results: list[launch.RankResult]) -> list[str]:
    return [result.stdout.read_text().strip() for result in results]


def test_a_cluster_gives_signals_back() -> None:
    """They kept raising SystemExit in a program whose cluster had ended."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with Cluster(1, kind="loopback"):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(("layout", "places"), [("nodes", ["0 0", "1 0"]), ("local", ["0 0", "0 1"])])
def test_ranks_find_their_place(cluster: Cluster, layout: launch.Layout, places: list[str]) -> None:
    """What torch and Lightning read; the first line is the same on all ranks."""
    results = run_ranks(
        cluster,
        sh('echo $MASTER_ADDR $WORLD_SIZE $GLOO_SOCKET_IFNAME; echo "$RANK: $NODE_RANK $LOCAL_RANK"'),
        layout=layout,
        timeout=20,
    )
    check(results)
    assert said(results) == [f"127.0.0.1 2 lo\n{rank}: {place}" for rank, place in enumerate(places)]


def test_each_run_has_a_port_and_each_rank_its_additions(cluster: Cluster) -> None:
    outputs = [
        said(run_ranks(cluster, sh("echo $MASTER_PORT $X"), [{"X": "a"}, {"X": "b"}], timeout=20)) for _ in range(2)
    ]
    for first, second in outputs:
        assert first.split()[0] == second.split()[0] and (first.split()[1], second.split()[1]) == ("a", "b")


def test_another_launchers_view_does_not_reach_the_ranks(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would take a Slurm job of one task for the whole truth."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("BENCHMARK_INTERFACE", "eth9")
    environment = launch.rank_environment(cluster, 1, 1234, "nodes")
    assert "SLURM_NTASKS" not in environment
    assert "BENCHMARK_INTERFACE" not in environment, "on loopback no rank has a link of its own"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_command_for_each_rank_in_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    results = run_ranks(cluster, [["pwd"], sh("exit 3")], timeout=20, cwd=tmp_path)
    assert said(results) == [str(tmp_path), ""]
    assert [result.returncode for result in results] == [0, 3]
    with pytest.raises(RanksFailed, match="rank 1: exit status 3"):
        check(results)


@pytest.mark.parametrize("commands", [[["true"]], [["true"], "true"], [["true"]] * 3, []])
def test_commands_that_fit_no_cluster(cluster: Cluster, commands: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="2 ranks but"):
        run_ranks(cluster, commands)


def test_time_is_up_for_all_and_what_they_started(cluster: Cluster) -> None:
    results = run_ranks(cluster, sh(f"echo begun; {RUNAWAY} [ $RANK = 0 ] || sleep 300"), timeout=1.0)
    assert [(result.returncode, result.ended) for result in results] == [(0, "itself"), (-signal.SIGKILL, "timeout")]
    assert said(results) == ["begun", "begun"], "what was printed before is kept"
    assert host.members(cluster.names) == []
    with pytest.raises(RanksFailed, match="time was up"):
        check(results)


def test_a_failed_rank_ends_the_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rank it is: the last one must be noticed while the first one runs on."""
    monkeypatch.setattr(launch, "_PEER_GRACE_S", 0.1)
    results = run_ranks(cluster, sh("[ $RANK = 0 ] && sleep 300; echo broken >&2; exit 7"), timeout=100)
    assert [(result.returncode, result.ended) for result in results] == [(-signal.SIGKILL, "peer"), (7, "itself")]
    with pytest.raises(RanksFailed, match=r"^rank 1: exit status 7\nbroken\nrank 0: .*another rank failed"):
        check(results)


def test_a_program_that_is_not_there_leaves_no_rank(cluster: Cluster) -> None:
    with pytest.raises(FileNotFoundError):
        run_ranks(cluster, [sh("sleep 300"), ["/no/such/program"]])
    assert host.members(cluster.names) == []


def test_files_go_with_the_cluster_unless_a_folder_is_given(tmp_path: Path) -> None:
    with Cluster(1, kind="loopback") as one:
        own = run_ranks(one, ["echo", "a"], timeout=20)
        kept = run_ranks(one, ["echo", "b"], timeout=20, folder=tmp_path / "kept")
        assert said(own) == ["a"]
    assert not own[0].stdout.exists()
    assert said(kept) == ["b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number: signal.Signals, tmp_path: Path) -> None:
    """Even a killed one: the kernel sees to that."""
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; exec sleep 300"
    command = [sys.executable, "-m", "examples.benchmarks.cluster", "--kind", "loopback", "--", "sh", "-c", script]
    launcher = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    launcher.send_signal(number)
    assert launcher.wait(timeout=20) != 0
    wait_until(lambda: not any(running(int(pid)) for pid in pids.read_text().split()))
    host.remove_stale()
    assert not list(Path(tempfile.gettempdir()).glob(f"embrace-{launcher.pid}-*")), "nor do its files stay for long"


def test_the_command_line_tells_ranks_apart(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["--ranks", "2", "--kind", "loopback", "--", "sh", "-c", "echo I am $RANK; exit $RANK"])
    out, err = capfd.readouterr()
    assert code == 1
    assert out.splitlines() == ["0| I am 0", "1| I am 1"]
    told = [line for line in err.splitlines() if not line.startswith("note: removed what a killed run left")]
    assert told == ["2 ranks on loopback, not shaped; bytes are counted payloads", "rank 1: exit status 1"]


def test_without_root_it_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with Cluster(2, rate="100mbit") as two:
        assert two.kind == "loopback" and two.read_link(0) is None and two.drops() == 0
        assert "loopback" in two.description and "note: no emulated links (" in two.description
    with pytest.raises(RuntimeError, match="namespaces were asked for"), Cluster(2, kind="namespaces"):
        pass


def test_a_cluster_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks were asked for"):
        Cluster(0)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
