"""Pretrained vectors: every known format, and what is said of files that are none."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_embrace.tables.build import building_columns
from lightning_embrace.utilities import LoadedVectors, load_vectors

WORDS = ["the", "of", "caf\u00e9", ". . .", "the", "zebra"]
COLUMNS = 5
VECTORS = torch.randn(len(WORDS), COLUMNS, generator=torch.Generator().manual_seed(0))
VOCABULARY = {"<pad>": 0, "zebra": 1, "unknown": 2, "the": 3, ". . .": 4, "caf\u00e9": 6}
ROWS = 8


def lines(vectors: Tensor = VECTORS) -> list[str]:
    return [" ".join([word, *(repr(float(v)) for v in vector)]) for word, vector in zip(WORDS, vectors)]


def glove(path: Path) -> None:
    path.write_text("\n".join(lines()) + "\n", encoding="utf-8")


def word2vec(path: Path) -> None:
    path.write_text("\n".join([f"{len(WORDS)} {COLUMNS}", *lines()]) + "\n", encoding="utf-8")


def zipped(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join([f"{len(WORDS)} {COLUMNS}", *lines()]))


def binary(path: Path, end: bytes = b"\n") -> None:
    with path.open("wb") as file:
        file.write(f"{len(WORDS)} {COLUMNS}\n".encode())
        for word, vector in zip(WORDS, VECTORS):
            # the format has no words with spaces
            file.write(word.replace(" ", "_").encode() + b" " + vector.numpy().tobytes() + end)


FORMATS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "GloVe": ("glove.txt", glove),
    "word2vec": ("vectors.vec", word2vec),
    "zipped": ("vectors.vec.gz", zipped),
    "binary": ("vectors.bin", binary),
    "binary, without ends of lines": ("vectors.bin", lambda path: binary(path, b"")),
}


def table(dtype: torch.dtype = torch.float32, **arguments: Any) -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(ROWS, COLUMNS, padding_idx=0, dtype=dtype, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_fills_the_rows_of_the_vocabulary(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    """Words with spaces and accents; of a word that is there twice the first; other rows stay, so does padding."""
    name, write = FORMATS[format]
    write(tmp_path / name)
    embedding = table(dtype)
    weight, before = embedding.weight, embedding.weight.detach().clone()
    vocabulary = VOCABULARY
    if "binary" in format:
        vocabulary = {word.replace(" ", "_"): row for word, row in VOCABULARY.items()}
    result = load_vectors(embedding, tmp_path / name, vocabulary)
    assert result == LoadedVectors(4, ("unknown",))
    expected = before.clone()
    for row, number in ((1, 5), (3, 0), (4, 3), (6, 2)):
        expected[row] = VECTORS[number].to(dtype)
    assert embedding.weight is weight and weight.requires_grad
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=0)


def test_more_vectors_than_are_written_at_once(tmp_path: Path) -> None:
    """And a vocabulary that is a list."""
    words = [f"w{i}" for i in range(2500)]
    vectors = torch.arange(2500.0)[:, None].expand(-1, 2)
    (tmp_path / "v.txt").write_text("".join(f"{w} {float(v[0])} {float(v[1])}\n" for w, v in zip(words, vectors)))
    embedding = nn.EmbeddingBag(2501, 2)
    assert load_vectors(embedding, tmp_path / "v.txt", [*reversed(words), "last"]) == LoadedVectors(2500, ("last",))
    assert torch.equal(embedding.weight[:2500], vectors.flip(0))


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2"])
def test_arrays(tmp_path: Path, dtype: str) -> None:
    """Row i is row i; or each row has a word. The padding row stays."""
    np.save(tmp_path / "v.npy", VECTORS.numpy().astype(dtype))
    exact = torch.from_numpy(np.load(tmp_path / "v.npy").astype("f4"))
    embedding = table()
    before = embedding.weight.detach().clone()
    assert load_vectors(embedding, tmp_path / "v.npy") == LoadedVectors(len(WORDS) - 1, ())
    assert torch.equal(embedding.weight[1:6], exact[1:])
    assert torch.equal(embedding.weight[0], before[0]) and torch.equal(embedding.weight[6:], before[6:])
    embedding = table()
    assert load_vectors(embedding, tmp_path / "v.npy", VOCABULARY, words=WORDS) == LoadedVectors(4, ("unknown",))
    assert torch.equal(embedding.weight[3], exact[0]) and torch.equal(embedding.weight[1], exact[5])


@pytest.mark.parametrize("format", ["GloVe", "binary", "npy"])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_columns_of_a_table_that_is_being_built(tmp_path: Path, format: str, world_size: int) -> None:
    """As in `configure_model`: each rank takes its columns, also one that has none."""
    whole = table()
    name = "v.npy" if format == "npy" else FORMATS[format][0]
    vocabulary: Any = VOCABULARY
    if format == "npy":
        np.save(tmp_path / name, VECTORS.numpy())
        vocabulary = None
    else:
        FORMATS[format][1](tmp_path / name)
    expected = load_vectors(whole, tmp_path / name, vocabulary)
    parts = []
    for rank in range(world_size):
        with building_columns(rank, world_size, lambda _: True):
            built = table()
            assert load_vectors(built, tmp_path / name, vocabulary) == expected
        parts.append(built.weight.columns_Vd)  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(parts, dim=1), whole.weight.detach())


def text(*written: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text("".join(line + "\n" for line in written))


def array(value: Any) -> Callable[[Path], Any]:
    return lambda path: np.save(path, value, allow_pickle=True)


def cut(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: (write(path), path.write_bytes(path.read_bytes()[:-9]))


def raw(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "another dimension": ("v.txt", text("the 1.0 2.0"), "vectors of 2 numbers, and the table has 5"),
    "another dimension in the header": ("v.txt", text("3 300"), "vectors of 300 numbers"),
    "another dimension in the array": ("v.npy", array(np.zeros((3, 4))), "vectors of 4 numbers"),
    "a short line": ("v.txt", text(lines()[0], "of 1.0 2.0"), "line 2 has 2 numbers instead of 5"),
    "no number": ("v.txt", text(lines()[0], "zebra 1 2 3 4 x"), "line 2: could not convert"),
    "too few lines": ("v.txt", text("2 5", lines()[0]), "has 1 vectors, and its first line says 2"),
    "a cut binary": ("v.bin", cut(binary), "ends in vector 6 of 6"),
    "a cut array": ("v.npy", cut(array(VECTORS.numpy())), "is broken"),
    "integers": ("v.npy", array(np.zeros((3, 5), dtype="i8")), "dtype int64; needed are floating"),
    "a pickled array": ("v.npy", array(np.array([{}, {}])), "is broken"),
    "one axis": ("v.npy", array(np.zeros(5)), r"shape \(5,\)"),
    "a pickle": ("v.pkl", raw(pickle.dumps({"the": [1.0]})), "no known format: it looks like a pickle"),
    "a zip archive": ("v.zip", raw(b"PK\3\4 and so on"), "a zip archive: unpack it"),
    "gzip under another name": ("v.txt", raw(gzip.compress(b"the 1 2 3 4 5\n")), "let its name end with .gz"),
    "a text": ("v.txt", text("Once upon a time"), "no known format. Known are"),
    "tabs": ("v.txt", text("the\t1\t2\t3\t4\t5"), "no known format"),
    "nothing": ("v.txt", text(), "no known format"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_none(tmp_path: Path, case: str) -> None:
    name, write, said = BROKEN[case]
    write(tmp_path / name)
    vocabulary = None if name.endswith(".npy") else VOCABULARY
    with pytest.raises(ValueError, match=said) as info:
        load_vectors(table(), tmp_path / name, vocabulary)
    assert str(tmp_path / name) in str(info.value)


def test_what_is_asked_for_wrongly(tmp_path: Path) -> None:
    """Words and vocabularies that do not fit the file or the table; nothing is written."""
    glove(tmp_path / "v.txt")
    np.save(tmp_path / "v.npy", VECTORS.numpy())
    embedding = table()
    before = embedding.weight.detach().clone()
    for path, arguments, said in (
        ("v.txt", {}, "must say which row"),
        ("v.txt", {"vocabulary": {"the": ROWS}}, "gives 'the' row 8, and the table has 8 rows"),
        ("v.txt", {"vocabulary": {"the": -1}}, "gives 'the' row -1"),
        ("v.txt", {"vocabulary": VOCABULARY, "words": WORDS}, "words of its own"),
        ("v.txt", {"vocabulary": VOCABULARY, "format": "npy"}, "was said to be 'npy', and it is 'text'"),
        ("v.npy", {"vocabulary": VOCABULARY}, "give `vocabulary` and `words`"),
        ("v.npy", {"vocabulary": VOCABULARY, "words": WORDS[1:]}, "has 6 vectors, and `words` has 5"),
    ):
        with pytest.raises(ValueError, match=said):
            load_vectors(embedding, tmp_path / path, **arguments)
    with pytest.raises(ValueError, match="has 6 vectors, and the table has 4"):
        load_vectors(nn.Embedding(4, COLUMNS), tmp_path / "v.npy")
    with pytest.raises(ValueError, match=r"needs an nn\.Embedding or nn\.EmbeddingBag, not a Linear"):
        load_vectors(nn.Linear(COLUMNS, ROWS), tmp_path / "v.txt", VOCABULARY)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        load_vectors(embedding, tmp_path / "none.txt", VOCABULARY)
    assert torch.equal(embedding.weight.detach(), before)
