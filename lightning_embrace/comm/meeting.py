"""Ranks that wait for each other's files: as long as it takes, while every rank's process is alive.

What is written to a disk may take longer than any exchange, and no `timeout` says how long. A process that writes, or
reads, answers a roll call from a thread of its own; one that is stopped does not. The messages run through the hub of
the control channel, because there no wait ends by itself and nothing of Lightning's comes between:

=========  ==========  ======================================================
message    direction   meaning
=========  ==========  ======================================================
words      rank → hub  what a rank says in a round, and what the round is for
gathered   hub → rank  all ranks' words
roll       both        who is there? The hub passes it on to every rank
here       both        the answer; the hub passes it on to the one who asked
=========  ==========  ======================================================
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_SLICE_SECONDS = 0.5

Message = dict[str, Any]


class Meeting:
    """A rank's side.

    Args:
        world_size: The number of ranks.
        send: Sends a message to the hub, and says whether it could.
    """

    def __init__(self, world_size: int, send: Callable[[Message], bool]) -> None:
        self._world_size = world_size
        self._send = send
        self._round = 0
        self._gathered: dict[int, Message] = {}
        self._here: set[int] = set()
        self._heard = threading.Condition()

    def gather(self, words: list[int | str], what: str, timeout: float, check: Callable[[], None]) -> list[list[Any]]:
        """Tells every rank a few words, and waits for theirs. Collective.

        Args:
            words: What this rank says, as JSON has it: all ranks' together travel in one frame.
            what: What the ranks do, for errors.
            timeout: After so many seconds of waiting the ranks are asked whether they are alive, and have as many to
                answer. Those that do are waited for further.
            check: Raises when another rank has failed.

        Returns:
            The words by rank.

        Raises:
            RuntimeError: A rank's process does not answer, or some ranks do something else.
        """
        number, self._round = self._round, self._round + 1
        if not self._send({"type": "words", "round": number, "what": what, "words": words}):
            check()  # the connection has just broken
            raise RuntimeError(f"{what!r} could not be told to the other ranks.")
        asked, since = False, time.monotonic()
        while (said := self._wait_for(number)) is None:
            check()
            if asked and not self._silent():
                asked, since = False, time.monotonic()
            if time.monotonic() - since < timeout:
                continue
            if asked:
                raise RuntimeError(_nobody_there(self._silent(), what, timeout))
            self._here.clear()
            asked, since = True, time.monotonic()
            self._send({"type": "roll"})
        if len(said["what"]) > 1:
            acts = ", ".join(f"rank {rank}: {act}" for rank, act in enumerate(said["what"]))
            raise RuntimeError(f"The ranks do different things at the same time: {acts}.")
        words_by_rank: list[list[Any]] = said["words"]
        return words_by_rank

    def hear(self, message: Message) -> None:
        """Call it with what the hub sends."""
        with self._heard:
            if message["type"] == "gathered":
                self._gathered[message["round"]] = message
            elif message["type"] == "here":
                self._here.add(message["rank"])
            elif message["type"] == "roll":
                self._send({"type": "here", "to": message["by"]})
            self._heard.notify_all()

    def _wait_for(self, number: int) -> Message | None:
        with self._heard:
            self._heard.wait_for(lambda: number in self._gathered, _SLICE_SECONDS)
            return self._gathered.pop(number, None)

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self._here]


class Attendance:
    """The hub's side: who has said what in which round.

    Args:
        world_size: The number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rounds: dict[int, dict[int, Message]] = {}

    def answers(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        """What is to be sent to whom after a message.

        Args:
            rank: Who has sent it.
            message: The message.

        Returns:
            Pairs of rank and message.
        """
        everybody = range(self._world_size)
        if message["type"] == "roll":
            return [(r, {"type": "roll", "by": rank}) for r in everybody]
        if message["type"] == "here":
            return [(message["to"], {"type": "here", "rank": rank})]
        number = message["round"]
        said = self._rounds.setdefault(number, {})
        said[rank] = message
        if len(said) < self._world_size:
            return []
        del self._rounds[number]
        acts = [said[r]["what"] for r in everybody]
        gathered = {
            "type": "gathered",
            "round": number,
            "what": acts if len(set(acts)) > 1 else acts[:1],
            "words": [said[r]["words"] for r in everybody],
        }
        return [(r, gathered) for r in everybody]


def _nobody_there(silent: list[int], what: str, timeout: float) -> str:
    # the hub is in rank 0's process: without it nobody is heard
    named = f"Rank {', '.join(map(str, silent))}" if 0 not in silent else "Rank 0"
    return (
        f"{named} has not come to {what!r}, and not answered for {timeout:g} s (`timeout`) whether its process is"
        " alive: it is stopped, or hangs."
    )
