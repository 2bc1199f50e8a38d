"""What a user can choose, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_embrace.lookahead.source import check_lookahead
from lightning_embrace.schedule.order import Name

WireDtype = Literal["bf16", "fp16"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
Lookahead = Literal["auto", "off"] | Callable[[Any], Mapping[str, Tensor]]
UnevenLoaders = Literal["stop", "raise"]
Communication = Literal["torch", "horovod"]
StateDictType = Literal["full", "sharded"]

_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EmbRaceConfig:
    """The validated arguments of :class:`~lightning_embrace.EmbRaceStrategy`.

    Raises:
        ValueError: An argument has a value that is not allowed; the message says which are.
    """

    tables: Literal["auto"] | tuple[str, ...]
    schedule: Name
    wire_dtype: torch.dtype | None
    process_group_backend: str | None
    timeout: timedelta
    start_method: StartMethod
    lookahead: Lookahead
    uneven_loaders: UnevenLoaders
    chunk_bytes: int | None
    trace: str | None
    communication: Communication = "torch"
    state_dict_type: StateDictType = "full"

    @classmethod
    def checked(
        cls,
        tables: str | Sequence[str],
        schedule: str,
        wire_dtype: str | None,
        process_group_backend: str | None,
        timeout: timedelta,
        start_method: str,
        lookahead: Lookahead,
        uneven_loaders: str,
        chunk_bytes: int | None,
        trace: str | Path | None,
        communication: str = "torch",
        state_dict_type: str = "full",
    ) -> EmbRaceConfig:
        """Validates the arguments as a user writes them."""
        if isinstance(tables, str):
            if tables != "auto":
                raise ValueError(
                    f"EmbRaceStrategy(tables={tables!r}): give 'auto' or a list of patterns, such as [{tables!r}]."
                )
        elif not all(isinstance(p, str) and p for p in tables):
            raise ValueError(f"EmbRaceStrategy(tables={tables!r}): every pattern must be a non-empty string.")
        _check("schedule", schedule, get_args(Name))
        _check("wire_dtype", wire_dtype, (None, *_WIRE_DTYPES))
        _check("communication", communication, get_args(Communication))
        _check("state_dict_type", state_dict_type, get_args(StateDictType))
        _check("start_method", start_method, get_args(StartMethod))
        for backend in (process_group_backend or "gloo").split(","):  # "gloo" or "cpu:gloo,cuda:nccl"
            if backend.split(":")[-1] not in dist.Backend.backend_list:
                raise ValueError(
                    f"EmbRaceStrategy(process_group_backend={process_group_backend!r}): torch.distributed knows"
                    f" {', '.join(repr(b) for b in dist.Backend.backend_list if b != 'undefined')}."
                )
        check_lookahead(lookahead)
        _check("uneven_loaders", uneven_loaders, get_args(UnevenLoaders))
        if chunk_bytes is not None and (not isinstance(chunk_bytes, int) or chunk_bytes < 1):
            raise ValueError(f"EmbRaceStrategy(chunk_bytes={chunk_bytes!r}): give a positive number of bytes, or None.")
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ValueError(f"EmbRaceStrategy(timeout={timeout!r}): give a positive datetime.timedelta.")
        return cls(
            tables="auto" if isinstance(tables, str) else tuple(tables),
            schedule=schedule,  # type: ignore[arg-type]
            wire_dtype=None if wire_dtype is None else _WIRE_DTYPES[wire_dtype],
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,  # type: ignore[arg-type]
            lookahead=lookahead,
            uneven_loaders=uneven_loaders,  # type: ignore[arg-type]
            chunk_bytes=chunk_bytes,
            trace=None if trace is None else str(trace),
            communication=communication,  # type: ignore[arg-type]
            state_dict_type=state_dict_type,  # type: ignore[arg-type]
        )


def _check(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"EmbRaceStrategy({name}={value!r}): allowed are {choices}.")
