"""What these tests leave as they found it, and what plain runs are made with."""

from __future__ import annotations

from tests.hydra.conftest import one_thread, same_handlers

__all__ = ["one_thread", "same_handlers"]
