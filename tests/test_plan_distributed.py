"""The plan on the screen: once a fit, on rank 0 alone, after the first synchronised step, beside progress bars."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn

from tests.support.lifecycle import At, Whole, loader, make_model, make_strategy, make_trainer

TITLE = "EmbRace on 2 ranks"
MODES = {
    "nothing": lambda: [],
    "tqdm": lambda: [TQDMProgressBar(refresh_rate=1)],
    "rich": lambda: [RichProgressBar(console_kwargs={"force_terminal": True, "width": 130})],
}


class Plain(Whole):
    """A model without tables."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Linear(5, 5), nn.Linear(5, 5)
        self.double()

    def forward(self, ids: Any) -> Any:
        return self.head(self.words(ids.double()) + self.bags(ids.double())).squeeze(1)


def show(mode: str, fits: int = 1, cls: Any = Whole, strategy: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Everything on the screen, and how often the plan stood there after each batch."""
    screen = io.StringIO()
    errors = screen if mode == "tqdm" else io.StringIO()
    counts = At("on_train_batch_end", lambda *_: (screen.getvalue() + errors.getvalue()).count("EmbRace on"))
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors):
        callbacks = [counts, *MODES[mode]()]
        for _ in range(fits):
            trainer = make_trainer(
                make_strategy("embrace", **(strategy or {})),
                callbacks=callbacks,
                enable_progress_bar=mode != "nothing",
                **arguments,
            )
            trainer.fit(make_model(cls=cls), loader(3))
    return screen.getvalue(), errors.getvalue(), counts.results


def test_once_a_fit_on_rank_0(ranks):
    """To stderr, with whole shapes, places, reasons and bytes; not before gradients have been synchronised."""
    strategy = {"tables": ["words"]}
    first, second = ranks(2).run(show, "nothing", 2, strategy=strategy, accumulate_grad_batches=2)
    out, err, counts = first
    assert TITLE not in out and err.count(TITLE) == 2
    assert counts == [0, 1, 1, 1, 2, 2]
    assert second[2] == [0] * 6
    (words, bags) = [line for line in err.splitlines() if "23 × 5" in line][:2]
    # 8 bytes an element, ring AllReduce of all of it: 2 · 1/2 · 920; a rank holds 3 of 5 columns, or all
    for text in ("words", "sharded", "matched by tables=", "920 B", "552 B"):
        assert text in words
    for text in ("bags", "replicated", "not matched by tables=", "920 B"):
        assert text in bags


def test_beside_tqdm(ranks):
    """A bar is taken away for the plan and put back: it used to end up in the plan's first line."""
    (screen, *_), _ = ranks(2).run(show, "tqdm")
    before, after = screen.split(TITLE)
    assert re.search(r"\r *\r?\Z", before), repr(before[-200:])
    assert "Epoch 0" in before and "Epoch 0" in after
    assert all(re.fullmatch(r"[┏┃┡│└].*[┓┃┩│┘]", line) for line in after.splitlines()[1:8]), after


def test_beside_rich(ranks):
    """A live display knows of nothing that is not printed through its own console."""
    (out, err, _), _ = ranks(2).run(show, "rich")
    assert TITLE in out and TITLE not in err
    assert out.index("words") < out.index("bags") < out.index("└")
    assert "Epoch 0" in out[out.index("└") :]


def test_without_tables(ranks):
    """A model without tables gets a sentence, no empty frame."""
    (_, err, _), _ = ranks(2).run(show, "nothing", cls=Plain, strategy={"tables": "auto"})
    assert f"{TITLE}: no embedding table" in err and "┃" not in err
