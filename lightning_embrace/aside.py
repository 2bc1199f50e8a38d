"""Work that goes on beside the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Aside:
    """Runs a function in a thread of its own, and hands its exception to whoever asks for its end.

    On CUDA it runs when its end is asked for: streams keep the order of one thread's work.

    Args:
        function: Exchanges nothing but what no other thread comes between.
        device: Where its tensors live.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            self._thread = threading.Thread(target=self._run, name="embrace-aside", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Waits until it has run.

        Raises:
            BaseException: What the function raised.
        """
        if self._thread is not None:
            self._thread.join()
        else:
            self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._function()
        except BaseException as error:
            self._error = error
