"""Worker processes that stay alive from test to test, so that cases share interpreters and process groups."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

# a fork of a clean server process: torch and lightning are imported once, and no test's threads are inherited
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning_embrace", "tests.support.models"])


class RemoteError(AssertionError):
    """A function raised on some rank; the message holds every rank's outcome."""


def free_port() -> int:
    """A port that was free a moment ago, below those that the kernel hands out: nobody gets it by chance meanwhile."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


def become_rank(rank: int, world_size: int, port: int) -> None:
    """Lets a Trainer in this process find itself launched already, with one thread."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)


def _restore(environment: dict[str, str]) -> None:
    """Puts back what a test's Trainer took or left: Lightning takes ``WORLD_SIZE`` at its end, seeds are left."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _serve(rank: int, world_size: int, port: int, pipe: Any) -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)  # a test may have set it before the server process was started
    become_rank(rank, world_size, port)
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    environment = dict(os.environ)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        _restore(environment)
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """N processes in which a Trainer with ``devices=N`` finds itself launched already.

    Args:
        world_size: N.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Calls a module-level function on every rank.

        Returns:
            The results by rank.

        Raises:
            RemoteError: A rank raised or did not answer in time; the processes are replaced for the next call.
        """
        outcomes = self.try_run(function, *args, timeout=timeout, **kwargs)
        if not all(ok for ok, _ in outcomes):
            text = "\n".join(
                f"--- rank {r}: {value if not ok else 'returned'}" for r, (ok, value) in enumerate(outcomes)
            )
            raise RemoteError(text)
        return [value for _, value in outcomes]

    def try_run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """As :meth:`run`, but returns (succeeded, result or traceback) by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + timeout
        outcomes: list[tuple[bool, Any]] = []
        for pipe in self._pipes:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                try:
                    outcomes.append(pipe.recv())
                except EOFError:
                    outcomes.append((False, "the process died"))
            else:
                outcomes.append((False, f"no answer within {timeout} s"))
        if not all(ok for ok, _ in outcomes):
            self.stop()  # their process group may be broken
        return outcomes

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _run_by_hand(environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...], pipe: Any) -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)  # a test may have set it before the server process was started
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    with contextlib.suppress(EOFError):
        pipe.recv()  # tensors are fetched from this process: it lives until they have been


def run_by_hand(environments: list[dict[str, str]], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls a module-level function in one new process per environment, as a cluster's scheduler would start them.

    Returns:
        The results.

    Raises:
        RemoteError: A process raised or did not answer within two minutes.
    """
    started = []
    for environment in environments:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_run_by_hand, args=(environment, function, args, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    deadline = time.monotonic() + 120.0
    outcomes: list[tuple[bool, Any]] = []
    for _, pipe in started:
        try:
            ready = pipe.poll(max(0.0, deadline - time.monotonic()))
            outcomes.append(pipe.recv() if ready else (False, "no answer within two minutes"))
        except EOFError:
            outcomes.append((False, "the process died"))
    for process, pipe in started:
        pipe.close()
        if any(not ok for ok, _ in outcomes):
            process.kill()
        process.join(30.0)
    if not all(ok for ok, _ in outcomes):
        raise RemoteError("\n".join(f"--- process {n}: {value}" for n, (_, value) in enumerate(outcomes)))
    return [value for _, value in outcomes]
