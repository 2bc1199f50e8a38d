"""What a rank does in the tests of the launcher: ``python -m tests.benchmarks.rank_program WHAT``, or as a fork."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path


def facts() -> None:
    """Prints what this process finds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    initial = dict(entry.partition("=")[::2] for entry in Path("/proc/self/environ").read_text().split("\0"))
    found = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "mark": initial["EMBRACE_CLUSTER"],
        "cwd": os.getcwd(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "leads its session": os.getsid(0) == os.getpid(),
        "sockets": [link for link in map(_target, os.listdir("/proc/self/fd")) if link.startswith("socket")],
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "parent": os.getppid(),
        "file pages": int(status["RssFile"].split()[0]) * 1024,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
        "counted peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found))


def stay() -> None:
    """Leaves a process in a session of its own behind, and does not end. Prints both pids."""
    runaway = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print(os.getpid(), runaway.pid, flush=True)
    time.sleep(300)


def fail() -> None:
    """Rank 1 fails."""
    if os.environ["RANK"] == "1":
        raise ValueError("this rank is broken")


def talk() -> None:
    """Rank 1 sends a datagram to rank 0, which prints where it came from, its length and what its link counted."""
    from examples.benchmarks.counters import LinkCounters

    counters = LinkCounters.of_this_rank()
    assert counters is not None
    before = counters.read()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("", 9999))
    if os.environ["RANK"] == "0":
        data, source = sock.recvfrom(2000)
        print(source[0], len(data), counters.read().since(before).received)
        sock.sendto(b"seen", source)
        return
    sock.settimeout(0.2)
    while True:  # until rank 0 listens
        sock.sendto(b"x" * 1000, (os.environ["MASTER_ADDR"], 9999))
        try:
            sock.recvfrom(10)
            return
        except (TimeoutError, ConnectionRefusedError):
            pass


def main() -> None:
    """Does what the first argument names."""
    {"facts": facts, "stay": stay, "fail": fail, "talk": talk}[sys.argv[1]]()


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the listing's own
        return ""


if __name__ == "__main__":
    main()
