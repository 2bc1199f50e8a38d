"""Integer tensors are found in whatever a data loader may give."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from lightning_embrace.lookahead.leaves import leaves

IDS = torch.tensor([3, 1])
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    ids: Tensor
    score: float = 0.5
    late: Tensor = field(init=False)


class Encoding(UserDict):
    """As transformers.BatchEncoding."""


class Store(MutableMapping):
    """As in torch_geometric.data.Data."""

    def __init__(self, **items: Any) -> None:
        self._mapping = items

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class Data:
    def __init__(self, **items: Any) -> None:
        self._store = Store(**items)


def test_follows_every_collection():
    batch = {
        "ids": IDS,
        "list": [IDS, (IDS, 1.5)],
        "pair": Pair(IDS, None),
        "sample": Sample(IDS),
        3: OrderedDict(a=IDS),
        "encoding": Encoding(input_ids=IDS),
        "graph": Data(edge_index=IDS, x=torch.rand(2)),
    }
    assert list(leaves(batch)) == [
        "['ids']",
        "['list'][0]",
        "['list'][1][0]",
        "['pair'].left",
        "['sample'].ids",
        "[3]['a']",
        "['encoding']['input_ids']",
        "['graph']._store['edge_index']",
    ]


def test_a_tensor_alone_is_a_batch():
    assert list(leaves(IDS)) == [""]
    assert leaves(IDS)[""] is not IDS and leaves(IDS)[""].equal(IDS)


def test_leaves_out_what_holds_no_ids():
    kinds = [torch.rand(2), IDS.to(torch.uint8), IDS > 1, IDS.to_sparse(), "text", b"", 7, None, nn.Linear(1, 1), print]
    assert leaves(kinds) == {}


def test_takes_int32_and_packed_and_jagged():
    nested = torch.nested.nested_tensor([IDS, torch.tensor([5])], layout=torch.jagged)
    found = leaves({"int": IDS.int(), "packed": pack_sequence([IDS]), "jagged": nested, "strided": _strided()})
    assert found["['int']"].dtype == torch.int32
    assert found["['packed'].data"].tolist() == [3, 1]
    assert found["['jagged']"].tolist() == [3, 1, 5]
    assert "['strided']" not in found


def _strided() -> Tensor:
    return torch.nested.nested_tensor([IDS, torch.tensor([5])])


def test_a_long_list_is_one_leaf():
    """Samples that were not collated: another number in every batch, and hundreds of paths otherwise."""
    found = leaves({"samples": [{"ids": torch.tensor([i]), "y": i} for i in range(100)]})
    assert {path: t.tolist() for path, t in found.items()} == {"['samples'][*]['ids']": list(range(100))}


def test_ends_in_what_refers_to_itself_or_is_very_deep():
    loop: list[Any] = [IDS]
    loop.append(loop)
    deep: list[Any] = [IDS]
    for _ in range(2000):
        deep = [deep]
    assert list(leaves({"loop": loop, "deep": deep})) == ["['loop'][0]"]
