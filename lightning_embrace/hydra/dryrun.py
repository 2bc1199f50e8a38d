"""The plan of a model that is not built, and does not train."""

from __future__ import annotations

from typing import Any

import torch

from lightning_embrace.hydra.config import HydraConfig
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.partition import divide
from lightning_embrace.hydra.plan import Planned, make_plan
from lightning_embrace.hydra.planning import budget_of, costs, default_sizes, glue_bytes, glue_room
from lightning_embrace.hydra.session import Session
from lightning_embrace.hydra.stepper import Stepper
from lightning_embrace.hydra.store import Store
from lightning_embrace.namespaces import Namespace


def planned_of(model: Any, config: HydraConfig, device: torch.device, namespace: Namespace) -> Planned:
    """Decides where the units of a model would live, before anything was measured.

    Args:
        model: A LightningModule, which may be on the meta device; ``configure_model`` is called there.
        config: The strategy's.
        device: Where it would run.
        namespace: The model's Lightning.

    Returns:
        The plan that training would begin with.

    Raises:
        DoesNotFitError: There is none.
        CoupledOptimizerError: The optimizer cannot be stepped shard by shard.
    """
    with torch.device("meta"):
        model.configure_model()
    sizes = default_sizes(config, device)
    host = Ledger("host", None)
    parts = divide(model, config.blocks, glue_room(sizes[0]))
    session = Session(parts, torch.device("meta"), {"host": host}, Store(device, host, None), config.prefetch)
    try:
        [optimizer], _, _ = namespace.get("core.optimizer._configure_optimizers")(model.configure_optimizers())
        states = Stepper(optimizer, session).plan_states()
        units = costs(session, None)
        budget = budget_of(sizes, config, glue_bytes(session, model, states), None, second_pass=False)
        return Planned(tuple(units), make_plan(units, budget), budget)
    finally:
        session.release()
