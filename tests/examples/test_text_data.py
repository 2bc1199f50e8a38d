"""The pure parts of the examples: vocabulary, windows, batches, and the sampler of negatives."""

import math
from pathlib import Path

import pytest
import torch

from examples.data.sampling import draw_negatives, log_inclusion, log_uniform_probability
from examples.data.text import Collate, TextDataModule, Windows, default_text
from examples.data.vocabulary import UNKNOWN, Vocabulary

V = 50


def test_vocabulary_is_sorted_by_count_then_word() -> None:
    vocabulary = Vocabulary.build(list("bacbadb"))
    assert vocabulary.words == ("b", "a", "c", "d", UNKNOWN)
    assert vocabulary.encode(["a", "b", "never seen"]).tolist() == [1, 0, 4]


def test_vocabulary_min_count_puts_unknown_at_its_rank() -> None:
    # "x", "y" and "z" become three unknown words, which is more than "a" has and as many as "b".
    vocabulary = Vocabulary.build(list("bbbaaxyz"), min_count=2)
    assert vocabulary.words == ("b", UNKNOWN, "a")


def test_vocabulary_max_size_counts_unknown() -> None:
    vocabulary = Vocabulary.build(list("aaaabbbc"), max_size=3)
    assert vocabulary.words == ("a", "b", UNKNOWN)
    assert Vocabulary.build(["a"], max_size=1).words == (UNKNOWN,)


def test_vocabulary_keeps_the_unknown_of_a_prepared_text() -> None:
    vocabulary = Vocabulary.build(f"{UNKNOWN} {UNKNOWN} a".split())
    assert vocabulary.words == (UNKNOWN, "a")


def test_vocabulary_needs_room_for_unknown() -> None:
    with pytest.raises(ValueError, match="max_size"):
        Vocabulary.build(["a"], max_size=0)
    with pytest.raises(ValueError, match=UNKNOWN):
        Vocabulary(("a",))


def test_windows_are_contiguous_and_overlap_by_the_target() -> None:
    windows = Windows(torch.arange(10), length=3)
    assert [(i, w.tolist()) for i, w in (windows[k] for k in range(len(windows)))] == [
        (0, [0, 1, 2, 3]),
        (1, [3, 4, 5, 6]),
        (2, [6, 7, 8, 9]),
    ]
    with pytest.raises(IndexError):
        windows[3]


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_windows_are_whole(tokens: int, expected: int) -> None:
    assert len(Windows(torch.arange(tokens), length=3)) == expected


def test_collate_shifts_targets_by_one() -> None:
    windows = Windows(torch.arange(10), length=3)
    batch = Collate(V)([windows[0], windows[2]])
    assert set(batch) == {"inputs", "targets"}
    assert batch["inputs"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert batch["targets"].tolist() == [[1, 2, 3], [7, 8, 9]]


def test_negatives_depend_on_seed_and_windows_only() -> None:
    windows = Windows(torch.arange(V), length=3)
    samples = [windows[0], windows[2]]
    negatives = Collate(V, negatives=20, seed=1)(samples)["negatives"]
    # Another object stands for another rank, loader worker or run.
    assert torch.equal(negatives, Collate(V, negatives=20, seed=1)(samples)["negatives"])
    assert not torch.equal(negatives, Collate(V, negatives=20, seed=2)(samples)["negatives"])
    assert not torch.equal(negatives, Collate(V, negatives=20, seed=1)([windows[0], windows[3]])["negatives"])


def test_batch_carries_the_log_probabilities_of_its_candidates() -> None:
    windows = Windows(torch.arange(V), length=3)
    batch = Collate(V, negatives=20)([windows[0], windows[1]])
    assert batch["negative_log_q"].shape == batch["negatives"].shape
    torch.testing.assert_close(batch["negative_log_q"], log_inclusion(batch["negatives"], V, 20))
    torch.testing.assert_close(batch["target_log_q"], log_inclusion(batch["targets"], V, 20))


def test_log_uniform_probabilities() -> None:
    p = log_uniform_probability(torch.arange(V), V)
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert p[0].item() == pytest.approx(math.log(2) / math.log(V + 1))
    assert (p.diff() < 0).all()


def test_inclusion_is_one_minus_never_drawn() -> None:
    p = log_uniform_probability(torch.arange(V), V)
    torch.testing.assert_close(log_inclusion(torch.arange(V), V, 1).exp(), p.float())
    torch.testing.assert_close(log_inclusion(torch.arange(V), V, 7).exp(), (1 - (1 - p) ** 7).float())
    assert log_inclusion(torch.arange(10), 10, 10_000).isfinite().all()


def test_inclusion_matches_what_is_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    times, draws = 4000, 10
    seen = torch.zeros(V)
    for _ in range(times):
        negatives = draw_negatives(V, draws, generator)
        assert len(negatives) <= draws
        assert len(negatives.unique()) == len(negatives)
        seen[negatives] += 1
    q = log_inclusion(torch.arange(V), V, draws).exp()
    # Five standard deviations of a frequency over `times` trials.
    assert ((seen / times - q).abs() < 5 * (q * (1 - q) / times).sqrt()).all()


def test_draws_stay_in_range() -> None:
    negatives = draw_negatives(3, 10_000, torch.Generator().manual_seed(0))
    assert negatives.tolist() == [0, 1, 2]


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{i % 7}" for i in range(200)) + "\n", encoding="utf-8")
    return str(path)


def test_data_module_splits_and_batches(book: str) -> None:
    data = TextDataModule(book, sequence_length=5, batch_size=4, val_fraction=0.25)
    assert data.num_tokens == 200
    assert data.vocab_size == 8
    data.setup("fit")
    train, val = list(data.train_dataloader()), list(data.val_dataloader())
    # 150 tokens give 29 windows, of which whole batches use 28; 50 tokens give 9.
    assert [len(batch["inputs"]) for batch in train] == [4] * 7
    assert [len(batch["inputs"]) for batch in val] == [4, 4, 1]
    for batch in train + val:
        # The text counts modulo 7, and so must every target, in whatever order the ids are.
        words = [data.vocabulary.words[i] for i in batch["inputs"].flatten().tolist()]
        following = [data.vocabulary.words[i] for i in batch["targets"].flatten().tolist()]
        assert following == [f"w{(int(word[1:]) + 1) % 7}" for word in words]


def test_data_module_is_deterministic(book: str) -> None:
    def batches(seed: int) -> list[dict[str, torch.Tensor]]:
        return list(TextDataModule(book, 5, 4, negatives=6, seed=seed).train_dataloader())

    first, second, other = batches(3), batches(3), batches(4)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in a)
    assert any(not torch.equal(a["inputs"], b["inputs"]) for a, b in zip(first, other, strict=True))


def test_data_module_pattern(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one, two. one", encoding="utf-8")
    assert set(TextDataModule(str(path)).vocabulary.words) == {"one,", "two.", "one", UNKNOWN}
    assert set(TextDataModule(str(path), pattern=r"\w+|[^\w\s]").vocabulary.words) == {"one", "two", ",", ".", UNKNOWN}


def test_data_module_names_the_cure_for_a_short_text(book: str) -> None:
    with pytest.raises(ValueError, match="HINT"):
        TextDataModule(book, sequence_length=100, batch_size=4).setup("fit")
    with pytest.raises(ValueError, match="val_fraction"):
        TextDataModule(book, val_fraction=1.0)


def test_default_text_is_large_enough_for_the_demo() -> None:
    assert len(default_text().split()) > 50_000
