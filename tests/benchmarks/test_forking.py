"""Ranks that are forked from a process with everything imported: they are as if started anew, and end as surely."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import host, launch
from examples.benchmarks.cluster import Cluster, RanksFailed, check, run_ranks
from examples.benchmarks.forking import Preloaded
from examples.benchmarks.launch import RankResult
from examples.benchmarks.starting import Start, Starter, anew
from tests.benchmarks.test_launch import running, said, wait_until

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
PROGRAM = "tests.benchmarks.rank_program"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2, kind="loopback") as two:
        yield two


@pytest.fixture
def preloaded() -> Iterator[Preloaded]:
    with Preloaded() as servers:
        yield servers


def forked(preloaded: Preloaded, *modules: str, path: Path = ROOT) -> Starter:
    """Forks of an interpreter that finds modules also in ``path``."""
    return preloaded.starter(PYTHON, [PROGRAM, *modules], {"PYTHONPATH": f"{ROOT}:{path}"})


def run(cluster: Cluster, what: str, start: Starter, timeout: float = 60, cwd: Path = ROOT) -> list[RankResult]:
    environment = [{"PYTHONPATH": str(ROOT)}] * cluster.ranks
    return run_ranks(cluster, [str(PYTHON), "-m", PROGRAM, what], environment, timeout, cwd=cwd, start=start)


def facts(cluster: Cluster, start: Starter, cwd: Path = ROOT) -> list[dict[str, Any]]:
    results = run(cluster, "facts", start, cwd=cwd)
    check(results)
    return [json.loads(text) for text in said(results)]


def server_of(cluster: Cluster, start: Starter) -> int:
    """The process that ranks are forked from."""
    parents = {found["parent"] for found in facts(cluster, start)}
    assert len(parents) == 1 and os.getpid() not in parents
    return int(parents.pop())


def test_a_fork_finds_what_a_new_program_finds(cluster: Cluster, preloaded: Preloaded, tmp_path: Path) -> None:
    """Arguments, all of the environment, folder, session, and the mark by which its processes are found and ended."""
    changing = {"parent", "file pages", "peak", "counted peak", "environment"}
    fork, new = (facts(cluster, start, tmp_path) for start in (forked(preloaded), anew))
    for ours, theirs in zip(fork, new):
        assert {k: v for k, v in ours.items() if k not in changing} == {
            k: v for k, v in theirs.items() if k not in changing
        }
        for environment in (ours["environment"], theirs["environment"]):
            del environment["MASTER_PORT"]  # of each run
        assert ours["environment"] == theirs["environment"]
        assert (ours["mark"], ours["sockets"]) == (cluster.names.cluster, [])


def test_a_forks_memory_is_that_of_a_new_program(cluster: Cluster, preloaded: Preloaded, tmp_path: Path) -> None:
    """Pages of libraries that nobody reads again count as before, and the peak of the importing process does not."""
    (tmp_path / "heavy.py").write_text("import array\nx = array.array('b', b'x') * 300_000_000\ndel x\n")
    program = f"import numpy.random\nfrom {PROGRAM} import main\nif __name__ == '__main__':\n    main()\n"
    (tmp_path / "with_numpy.py").write_text(program)
    command = [str(PYTHON), "-m", "with_numpy", "facts"]
    environment = [{"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}] * 2
    found = []
    for start in (preloaded.starter(PYTHON, ["with_numpy", "heavy"], environment[0]), anew):
        results = run_ranks(cluster, command, environment, 60, start=start)
        check(results)
        found.append(json.loads(said(results)[0]))
    fork, new = found
    for name in ("file pages", "peak"):
        assert fork[name] == pytest.approx(new[name], abs=5e6)
    assert fork["counted peak"] == pytest.approx(fork["peak"], abs=5e6)


def test_when_time_is_up_ranks_end_and_their_server_goes_on(cluster: Cluster, preloaded: Preloaded) -> None:
    """With what a rank has started, in whatever session. The next job is forked from the same process."""
    start = forked(preloaded)
    server = server_of(cluster, start)
    results = run(cluster, "stay", start, timeout=1.0)
    assert [(result.returncode, result.ended) for result in results] == [(-signal.SIGKILL, "timeout")] * 2
    pids = [int(word) for text in said(results) for word in text.split()]
    assert len(pids) == 4
    assert not any(running(pid) for pid in pids) and host.members(cluster.names) == []
    assert server_of(cluster, start) == server


def test_a_fork_that_fails_says_why(
    cluster: Cluster, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "_PEER_GRACE_S", 0.1)
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: exit status 1\nTraceback.*ValueError: this rank is broken"):
        check(run(cluster, "fail", forked(preloaded)))
    command = [str(PYTHON), "-m", "no_such_program"]
    with pytest.raises(RanksFailed, match="No module named 'no_such_program'"):
        check(run_ranks(cluster, command, timeout=60, start=forked(preloaded)))
    with pytest.raises(RanksFailed, match="No such file or directory"):
        check(run(cluster, "facts", forked(preloaded), cwd=tmp_path / "gone"))


def test_what_cannot_be_imported_is_left_to_the_ranks(cluster: Cluster, preloaded: Preloaded, tmp_path: Path) -> None:
    """A peer whose environment is broken says so itself."""
    (tmp_path / "broken.py").write_text("raise ImportError('a wheel for another torch')\n")
    start = forked(preloaded, "broken", path=tmp_path)
    server_of(cluster, start)
    command = [str(PYTHON), "-m", "broken"]
    with pytest.raises(RanksFailed, match="a wheel for another torch"):
        check(run_ranks(cluster, command, [{"PYTHONPATH": str(tmp_path)}] * 2, 60, start=start))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import os; print('dying', flush=True); os._exit(3)", "dying"),
        ("import threading, time; threading.Thread(target=time.sleep, args=[9], daemon=True).start()", "2 threads run"),
    ],
)
def test_where_nothing_can_be_forked_ranks_start_anew(
    cluster: Cluster, preloaded: Preloaded, tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, why: str
) -> None:
    """An import that ends the process, or leaves threads, which a fork would lose. It is said once."""
    (tmp_path / "special.py").write_text(source)
    start = forked(preloaded, "special", path=tmp_path)
    for _ in range(2):
        assert [found["parent"] for found in facts(cluster, start)] == [os.getpid()] * 2
    told = capfd.readouterr().err
    assert told.count("starts each rank anew") == 1 and why in told


def test_ranks_end_with_the_process_they_were_forked_from(
    cluster: Cluster, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """When it is killed, for lack of memory say, the job has failed, and the next one starts anew."""
    start = forked(preloaded)
    server = server_of(cluster, start)

    def killing(rank: Start) -> Any:
        process = start(rank)
        if rank.environment["RANK"] == "1":
            os.kill(server, signal.SIGKILL)
        return process

    with pytest.raises(RanksFailed, match=f"rank 0: exit status {-signal.SIGKILL}"):
        check(run(cluster, "stay", killing))
    assert host.members(cluster.names) == []
    assert "starts each rank anew" in capfd.readouterr().err
    assert [found["parent"] for found in facts(cluster, start)] == [os.getpid()] * 2


def test_only_a_module_of_this_interpreter_can_be_forked(cluster: Cluster, preloaded: Preloaded) -> None:
    with pytest.raises(ValueError, match=r"cannot be forked\. Write"):
        run_ranks(cluster, ["sh", "-c", "true"], start=forked(preloaded))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    """Neither the ranks nor the process that they were forked from."""
    script = f"""
import sys
from pathlib import Path
from examples.benchmarks.cluster import Cluster, run_ranks
from examples.benchmarks.forking import Preloaded
python = Path(sys.executable)
with Preloaded() as preloaded, Cluster(2, kind="loopback") as cluster:
    start = preloaded.starter(python, ["{PROGRAM}"], {{}})
    run_ranks(cluster, [str(python), "-m", "{PROGRAM}", "stay"], start=start, folder=Path({str(tmp_path)!r}))
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    files = [tmp_path / f"rank{rank}.out" for rank in range(2)]
    wait_until(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files))
    ranks = [int(file.read_text().split()[0]) for file in files]
    server = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    launcher.send_signal(number)
    assert launcher.wait(timeout=60) != 0
    wait_until(lambda: not any(running(pid) for pid in (*ranks, server)))
    host.remove_stale()
