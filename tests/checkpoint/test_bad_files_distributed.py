"""Checkpoints that cannot be read or written: one clear error on every rank, nobody waits, nothing is overwritten."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.lifecycle import (
    At,
    Whole,
    assert_same,
    loader,
    make_model,
    make_strategy,
    make_trainer,
    plain,
    results,
    this_rank,
)
from tests.test_interruption_distributed import caught

FORMATS = ("full", "sharded")
N = 2


class Other(Whole):
    """A table of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Embedding(23, 2, dtype=torch.float64)


# ---- reading -------------------------------------------------------------------------------------------------------


def save(state_dict_type: str, path: str) -> None:
    trainer = make_trainer(make_strategy("embrace", state_dict_type=state_dict_type), N, enable_checkpointing=True)
    trainer.callbacks.append(At("on_train_batch_end", lambda t, _: t.save_checkpoint(path), count=2))
    trainer.fit(make_model(), loader(2))


def resume_each(state_dict_type: str, cases: list[tuple[Any, list[Any]]]) -> list[tuple[Any, bool]]:
    """By case, what a fit came to that was to go on from this rank's path, and whether its model was left alone."""
    ends = []
    for cls, paths in cases:
        model = make_model(cls=cls) if isinstance(cls, type) else make_model(**cls)
        before = plain(dict(model.state_dict()))
        trainer = make_trainer(make_strategy("embrace", state_dict_type=state_dict_type), N)
        chain = caught(trainer.fit, model, loader(3), ckpt_path=paths[this_rank()])
        with contextlib.suppress(AssertionError):
            assert_same(plain(dict(model.state_dict())), before)
            ends.append((chain, True))
            continue
        ends.append((chain, False))
    return ends


@pytest.fixture(scope="module", params=FORMATS)
def good(request: pytest.FixtureRequest, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A format, and a whole checkpoint in it."""
    path = tmp_path_factory.mktemp("good") / "good.ckpt"
    ranks(N).run(save, request.param, str(path))
    return request.param, path


def copy(good: Path, to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(good, to) if good.is_dir() else shutil.copy(good, to))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def turn(path: Path) -> None:
    """Turns a bit of a weight: of what is certainly read."""
    data = bytearray(path.read_bytes())
    weight = make_model().head.weight.detach().numpy().tobytes()
    position = data.find(weight)
    data[position if position >= 0 else len(data) // 2] ^= 4
    path.write_bytes(data)


def _spoil_file(path: Path, how: str) -> None:
    {"cut": cut, "turned": turn}[how](path)


def _spoil_folder(path: Path, how: str) -> None:
    part = max(path.glob("__1_*"), key=lambda p: p.stat().st_size)
    meta = path / ".metadata"
    {
        "cut": lambda: cut(part),
        "turned": lambda: turn(part),
        "part missing": part.unlink,
        "unfinished": lambda: [p.unlink() for p in path.iterdir() if not p.name.startswith("__")],
        "list cut": lambda: cut(meta),
    }[how]()


#: how a checkpoint is spoilt, and words of the error
FILE = {"cut": "it is cut off", "turned": "it is damaged, it has changed since it was written: Bad CRC-32"}
FOLDER = {
    "cut": "it is not whole (",
    "turned": "was changed after it was written",
    "part missing": " is missing",
    "unfinished": "are missing: it was not finished",
    "list cut": ".metadata",
}


def test_spoilt(ranks: Any, good: tuple[str, Path], tmp_path: Path) -> None:
    """Every rank says the same, whichever found it; no weight is loaded, and the files stay as they are."""
    kind, whole = good
    hows, spoil = (FILE, _spoil_file) if kind == "full" else (FOLDER, _spoil_folder)
    paths = {how: copy(whole, tmp_path / how / "spoilt.ckpt") for how in hows}
    for how, path in paths.items():
        spoil(path, how)
    prints = {how: print_of(path) for how, path in paths.items()}
    ends = ranks(N).run(resume_each, kind, [(Whole, [str(path)] * N) for path in paths.values()])
    for (how, path), outcomes in zip(paths.items(), zip(*ends)):
        check(outcomes, "CheckpointError", f"The checkpoint {path} cannot be read on rank", hows[how])
        assert print_of(path) == prints[how]


def test_not_there_or_not_the_same(ranks: Any, good: tuple[str, Path], tmp_path: Path) -> None:
    """Files that some ranks do not see, or see otherwise: a folder that is not shared."""
    kind, whole = good
    mine, theirs = copy(whole, tmp_path / "a" / "x.ckpt"), tmp_path / "b" / "x.ckpt"
    other = tmp_path / "c" / "x.ckpt"
    ranks(N).run(save, kind, str(other))  # of the same step, with a different time in it, or equal
    ranks(N).run(save_later, kind, str(other))
    none = str(tmp_path / "none.ckpt")
    cases = [
        ([none, none], "FileNotFoundError", f"Checkpoint file not found: {none}"),
        ([str(mine), str(theirs)], "FileNotFoundError", f"Checkpoint file not found on rank 1: {theirs}"),
        ([str(theirs), str(mine)], "FileNotFoundError", f"Checkpoint file not found on rank 0: {theirs}"),
        ([str(mine), str(other)], "CheckpointError", "is another checkpoint than rank 0's"),
        ([str(mine), None], "CheckpointError", f"Rank 0 is to go on from {mine}, and rank 1 from no checkpoint"),
        ([None, str(mine)], "CheckpointError", f"Rank 1 is to go on from {mine}, and rank 0 from no checkpoint"),
        ([None, none], "CheckpointError", f"Rank 1 is to go on from {none}, and rank 0 from no checkpoint"),
    ]
    ends = ranks(N).run(resume_each, kind, [(Whole, paths) for paths, _, _ in cases])
    for (_, error, words), outcomes in zip(cases, zip(*ends)):
        check(outcomes, error, words, model_left_alone=False)


def save_later(state_dict_type: str, path: str) -> None:
    trainer = make_trainer(make_strategy("embrace", state_dict_type=state_dict_type), N, enable_checkpointing=True)
    trainer.callbacks.append(At("on_train_batch_end", lambda t, _: t.save_checkpoint(path), count=3))
    trainer.fit(make_model(), loader(3))


def test_no_checkpoint_or_of_another_model(ranks: Any, good: tuple[str, Path], tmp_path: Path) -> None:
    """Text, a tensor, weights alone, an empty folder; other names and other shapes."""
    kind, whole = good
    text, tensor, weights, empty = (tmp_path / name for name in ("text.ckpt", "tensor.ckpt", "weights.ckpt", "empty"))
    text.write_text("no checkpoint at all\n" * 9)
    torch.save(torch.ones(3), tensor)
    torch.save(make_model().state_dict(), weights)
    empty.mkdir()
    cases: list[tuple[Any, Path, str, str]] = [
        (
            Whole,
            text,
            "CheckpointError",
            f"The checkpoint {text} cannot be read on ranks 0, 1: it is no checkpoint: it begins",
        ),
        (Whole, tensor, "CheckpointError", "it is no checkpoint of Lightning's, it holds Tensor"),
        (Whole, weights, "CheckpointError", "it holds a dictionary with the keys ['steps', 'words.weight'"),
        (Whole, empty, "CheckpointError", f"The checkpoint {empty} cannot be read on ranks 0, 1"),
        (Other, whole, "RuntimeError", "more.weight"),
        ({"columns": 7}, whole, "RuntimeError", "words.weight"),
    ]
    prints = [print_of(path) for _, path, _, _ in cases]
    ends = ranks(N).run(resume_each, kind, [(cls, [str(path)] * N) for cls, path, _, _ in cases])
    for (_, _, error, words), outcomes in zip(cases, zip(*ends)):
        check(outcomes, error, words, model_left_alone=False)
    assert [print_of(path) for _, path, _, _ in cases] == prints


def check(outcomes: Any, error: str, *words: str, model_left_alone: bool = True) -> None:
    for chain, alone in outcomes:
        assert chain, "the fit went on"
        assert chain[0][0] == error, chain
        assert chain[0][1] == outcomes[0][0][0][1], "the ranks say different things"
        for word in words:
            assert word in chain[0][1], chain
        assert alone or not model_left_alone


def print_of(path: Path) -> dict[str, str]:
    """What a file or a folder holds, and whatever has been put beside it."""
    files = [p for p in path.parent.rglob("*") if p.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# ---- writing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, which may become full or read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "embrace-test", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"a disk cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb") as file:
        while True:
            file.write(b"\0" * 4096)
            file.flush()


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


#: what goes wrong on a disk, how it is put right, and what the error says
TROUBLE: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "full": (_fill, lambda folder: (folder / "filler").unlink(), "No space left on device"),
    "read-only": (lambda f: _remount(f, "ro"), lambda f: _remount(f, "rw"), "Read-only file system"),
    "limited": (lambda _: _limit(2000), lambda _: _limit(resource.RLIM_INFINITY), "File too large"),
}


def save_in_trouble(state_dict_type: str, folder: str, trouble: str) -> Any:
    """Saves, saves twice in trouble, and again when it is over; training goes on all the while."""
    bad, right, _ = TROUBLE[trouble]
    everywhere = trouble == "limited"  # a limit is a process' own
    errors, found = [], []

    def at(trainer: Any, module: Any) -> None:
        def on_one(act: Callable[[Path], None]) -> None:
            if everywhere or this_rank() == 0:
                act(Path(folder))
            trainer.strategy.barrier()

        step = trainer.global_step
        if step == 1:
            trainer.save_checkpoint(f"{folder}/one.ckpt")
        if step == 2:
            before = print_of(Path(folder, "one.ckpt"))
            trainer.strategy.barrier()
            on_one(bad)
            errors.extend(caught(trainer.save_checkpoint, f"{folder}/{name}.ckpt") for name in ("one", "two"))
            on_one(right)
            found.append(print_of(Path(folder, "one.ckpt")) == before)
        if step == 3:
            trainer.save_checkpoint(f"{folder}/one.ckpt")

    model = make_model()
    strategy = make_strategy("embrace", state_dict_type=state_dict_type)
    trainer = make_trainer(strategy, N, callbacks=[At("on_train_batch_end", at)], enable_checkpointing=True)
    trainer.fit(model, loader(5))
    return errors, found, results(model, trainer)


def plainly() -> Any:
    model = make_model()
    trainer = make_trainer(make_strategy("embrace"), N)
    trainer.fit(model, loader(5))
    return results(model, trainer)


def go_on(state_dict_type: str, path: str) -> Any:
    model = make_model(seed=5)
    trainer = make_trainer(make_strategy("embrace", state_dict_type=state_dict_type), N)
    trainer.fit(model, loader(5), ckpt_path=path)
    return trainer.global_step


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize("kind", FORMATS)
def test_trouble_in_writing(
    ranks: Any, request: pytest.FixtureRequest, tmp_path: Path, kind: str, trouble: str
) -> None:
    """The checkpoint of before stays, nothing is left beside it, and whoever catches the error trains on exactly."""
    folder = tmp_path if trouble == "limited" else request.getfixturevalue("disk")
    expected = ranks(N).run(plainly)
    for rank, (errors, found, ours) in enumerate(ranks(N).run(save_in_trouble, kind, str(folder), trouble)):
        assert found == [True]
        for name, chain in zip(("one", "two"), errors):
            assert chain[0][0] == "CheckpointError", chain
            assert f"The checkpoint {folder}/{name}.ckpt could not be written on rank" in chain[0][1]
            assert TROUBLE[trouble][2] in chain[0][1]
            assert chain[0][1].endswith(f"The last whole one is {folder}/one.ckpt.")
        assert_same(ours, expected[rank])
    assert [p.name for p in folder.iterdir()] == ["one.ckpt"]
    assert ranks(N).run(go_on, kind, f"{folder}/one.ckpt") == [5 + 0, 5 + 0]
    assert os.path.exists(folder / "one.ckpt")
