"""The plan of a model that is not built, and does not train."""

from __future__ import annotations

from typing import Any

import torch

from lightning_embrace.hydra.config import HydraConfig
from lightning_embrace.hydra.ledger import Ledger
from lightning_embrace.hydra.partition import divide
from lightning_embrace.hydra.plan import Planned
from lightning_embrace.hydra.planning import default_sizes, glue_room, plan_of, smaller_glue_room
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

    def opened(glue: int) -> Session:
        parts = divide(model, config.blocks, glue)
        return Session(parts, torch.device("meta"), {"host": host}, Store(device, host, None), config.prefetch)

    session = opened(glue_room(sizes[0]))
    try:
        [optimizer], _, _ = namespace.get("core.optimizer._configure_optimizers")(model.configure_optimizers())
        stepper = Stepper(optimizer, session)
        states = stepper.plan_states()
        smaller = smaller_glue_room(session, states, sizes[0])
        if smaller is not None:
            session.release()
            session = opened(smaller)
            stepper = Stepper(optimizer, session)
            states = stepper.plan_states()
        return plan_of(session, model, config, sizes, states, stepping=stepper.temporaries())
    finally:
        session.release()
