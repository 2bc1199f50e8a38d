"""Where the main thread of a rank spends its measured steps."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

_LINES = 45


class StepProfiler:
    """Profiles the steps after the warm-up.

    Args:
        file: Where the text goes.
        warmup: Steps that are left out.
    """

    def __init__(self, file: str, warmup: int) -> None:
        self._file, self._left = Path(file), warmup
        self._profile = cProfile.Profile()

    def step(self) -> None:
        """Call at the end of every step."""
        self._left -= 1
        if self._left == 0:
            self._profile.enable()

    def end(self) -> None:
        """Call at the end of the training: writes what took longest, by itself and with what it called."""
        self._profile.disable()
        text = io.StringIO()
        for order in ("tottime", "cumulative"):
            pstats.Stats(self._profile, stream=text).sort_stats(order).print_stats(_LINES)
        self._file.write_text(text.getvalue())
