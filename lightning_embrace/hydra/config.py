"""What a user can choose, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lightning_embrace.config import StateDictType
from lightning_embrace.hydra.sizes import parse_bytes

Blocks = Literal["auto"] | list[str]


@dataclass(frozen=True)
class HydraConfig:
    """The validated arguments of :class:`~lightning_embrace.HydraStrategy`.

    Attributes:
        device_memory: Bytes, or None: a share of what there is.
        host_memory: Bytes, or None: a share of what there is.
        disk: A folder, or None: no disk tier.
        blocks: ``"auto"``, or patterns of module names.
        prefetch: Whether a shard is loaded while the one before it computes.
        state_dict_type: ``"full"``: checkpoints are files; ``"sharded"``: they are folders.
    """

    device_memory: int | None
    host_memory: int | None
    disk: Path | None
    blocks: Literal["auto"] | tuple[str, ...]
    prefetch: bool
    state_dict_type: StateDictType = "full"

    @classmethod
    def checked(
        cls,
        device_memory: int | str | None,
        host_memory: int | str | None,
        disk: str | Path | None,
        blocks: Literal["auto"] | Sequence[str],
        prefetch: bool,
        state_dict_type: str = "full",
    ) -> HydraConfig:
        """Validates the arguments as a user writes them.

        Raises:
            ValueError: An argument has a value that is not allowed; the message says which are.
        """
        if isinstance(blocks, str):
            if blocks != "auto":
                raise ValueError(
                    f"HydraStrategy(blocks={blocks!r}): give 'auto' or a list of patterns, such as [{blocks!r}]."
                )
        elif not blocks or not all(isinstance(p, str) and p for p in blocks):
            raise ValueError(f"HydraStrategy(blocks={blocks!r}): give 'auto' or a list of non-empty patterns.")
        if not isinstance(prefetch, bool):
            raise ValueError(f"HydraStrategy(prefetch={prefetch!r}): give True or False.")
        if state_dict_type not in get_args(StateDictType):
            raise ValueError(f"HydraStrategy(state_dict_type={state_dict_type!r}): allowed are 'full', 'sharded'.")
        if disk is not None and not isinstance(disk, (str, Path)):
            raise ValueError(f"HydraStrategy(disk={disk!r}): give a folder on a disk with free space, or None.")
        return cls(
            device_memory=None if device_memory is None else parse_bytes("device_memory", device_memory),
            host_memory=None if host_memory is None else parse_bytes("host_memory", host_memory),
            disk=None if disk is None else Path(disk),
            blocks="auto" if isinstance(blocks, str) else tuple(blocks),
            prefetch=prefetch,
            state_dict_type=state_dict_type,  # type: ignore[arg-type]
        )
