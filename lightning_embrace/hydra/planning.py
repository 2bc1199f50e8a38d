"""What there is, what everything takes, and the plan that follows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lightning_embrace.hydra.config import HydraConfig
from lightning_embrace.hydra.partition import trained_bytes
from lightning_embrace.hydra.pilot import Pilot
from lightning_embrace.hydra.plan import Budget, Planned, UnitCost, make_plan
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.sizes import HOST_SHARE, usable_bytes

#: of what this process may use, where nothing was said
_DEVICE_SHARE = 0.2
_GPU_SHARE = 0.9
#: of the device, for activations that were not measured yet
_UNMEASURED = 0.25
#: of the device, for parameters outside of blocks, their gradients and optimizer states
_GLUE = 0.25


def default_sizes(config: HydraConfig, device: torch.device) -> tuple[int, int]:
    """Budgets of device and host.

    Args:
        config: What was asked.
        device: Where the model runs.

    Returns:
        Bytes.
    """
    usable = usable_bytes()
    if device.type == "cuda":
        ours = int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    else:
        ours = int(usable * _DEVICE_SHARE)
    return config.device_memory or ours, config.host_memory or int(usable * HOST_SHARE)


def glue_room(device: int) -> int:
    """What parameters outside of blocks and their gradients may take of a device's budget."""
    return int(device * _GLUE)


def smaller_glue_room(session: Session, states: int, device: int) -> int | None:
    """The same where an optimizer keeps so much for them that the model's blocks would lack it.

    Args:
        session: The model in parts, and what the optimizer keeps for blocks.
        states: What it keeps for parameters outside of blocks.
        device: The budget.

    Returns:
        Bytes of parameters and gradients; None: they have room with their states, or the whole model has.
    """
    outside, room = trained_bytes(session.partition.glue), glue_room(device)
    blocks = sum(u.weights.nbytes + u.gradient_bytes + u.states.nbytes for u in session.units)
    if outside + states <= room or outside + states + blocks <= device:
        return None
    return room * outside // (outside + states)


def glue_bytes(session: Session, model: nn.Module, states: int) -> int:
    """What is always on the device: parameters outside of blocks, all buffers, and copies of those of blocks.

    Args:
        session: The model in parts.
        model: The model.
        states: What the optimizer keeps for parameters outside of blocks.

    Returns:
        Bytes.
    """
    parameters = trained_bytes(session.partition.glue)
    inside = sum(_nbytes(b) for block in session.partition.blocks for b in block.module.buffers())
    return parameters + states + sum(_nbytes(b) for b in model.buffers()) + inside


def plan_of(
    session: Session,
    model: nn.Module,
    config: HydraConfig,
    sizes: tuple[int, int],
    states: int | None,
    pilot: Pilot | None = None,
    second_pass: bool = False,
    stepping: int = 0,
) -> Planned:
    """Decides where the units of a model live.

    Args:
        session: The model in parts.
        model: The model.
        config: What was asked.
        sizes: Of device and host.
        states: What the optimizer keeps for parameters outside of blocks; None: nothing is trained.
        pilot: What the first step has measured, or None.
        second_pass: Whether gradients wait in the store.
        stepping: What a step of the optimizer takes beside parameters, gradients and states.

    Raises:
        DoesNotFitError: There is no plan.
    """
    units = costs(session, pilot)
    if states is None:
        units = [replace(unit, gradients=0) for unit in units]
    budget = budget_of(sizes, config, glue_bytes(session, model, states or 0), pilot, second_pass, stepping)
    return Planned(tuple(units), make_plan(units, budget), budget)


def costs(session: Session, pilot: Pilot | None) -> list[UnitCost]:
    """What the units take, in the order of the session's.

    Args:
        session: The model in parts.
        pilot: What the first step has measured, or None.
    """
    found = []
    for unit, indices in zip(session.units, session.partition.units):
        names = [session.partition.blocks[i].name for i in indices]
        activations = 0 if pilot is None else sum(pilot.activations[n] for n in names)
        calls = 0 if pilot is None else sum(pilot.calls[n] for n in names)
        found.append(
            UnitCost(unit.name, unit.weights.nbytes, unit.gradient_bytes, unit.states.nbytes, activations, calls)
        )
    return found


def budget_of(
    sizes: tuple[int, int], config: HydraConfig, glue: int, pilot: Pilot | None, second_pass: bool, stepping: int
) -> Budget:
    """What there is.

    Args:
        sizes: Of device and host.
        config: What was asked.
        glue: What is always on the device.
        pilot: What the first step has measured, or None.
        second_pass: Whether gradients wait in the store.
        stepping: What a step of the optimizer takes beside parameters, gradients and states.
    """
    device, host = sizes
    share = 0.0 if pilot is not None else _UNMEASURED
    unmeasured = int(share * max(0, device - glue))
    working = max(stepping, unmeasured) if pilot is None else pilot.working(stepping)
    return Budget(device, host, config.disk is not None, glue, working, config.prefetch, second_pass, share)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
