"""A model whose tables are elsewhere computes what it computed with them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from examples.benchmarks.peers.lookups import Emptied, Table, find_tables, ids_of


class Words(nn.Module):
    """Two look-ups of one table, one of another, and a padding word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=3)
        self.kinds = nn.ModuleDict({"kind": nn.Embedding(5, 2)})
        self.score = nn.Linear(6, 1)

    def forward(self, ids: Tensor, kinds: Tensor, others: Tensor) -> Tensor:
        rows = torch.cat([self.words(ids), self.kinds["kind"](kinds)], dim=-1)
        loss: Tensor = self.score(nn.functional.dropout(rows, 0.3)).square().mean() + self.words(others).sin().mean()
        return loss


def batch() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([[1, 3], [1, 2]]), torch.tensor([[0, 4], [4, 4]]), torch.tensor([2, 3, 10])


def fetched(tables: list[Table], lookups: list, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {table.name: weights[table.name][ids_of(lookups, table.name)] for table in tables}


def test_same_loss_and_gradients_as_with_tables() -> None:
    """Rows reach the look-up they belong to, also of a table that is looked up twice, and padding gets no gradient."""
    plain = Words()
    model = copy.deepcopy(plain)
    tables = find_tables(model)
    emptied = Emptied(model, tables)
    lookups = emptied.record(lambda: model(*batch()))
    assert [lookup.table for lookup in lookups] == ["words", "kinds_kind", "words"]
    weights: dict[str, Tensor] = {table.name: table.weight for table in tables}
    torch.manual_seed(5)
    with emptied.rows(lookups, fetched(tables, lookups, weights)):
        loss = model(*batch())
    torch.manual_seed(5)
    expected = plain(*batch())
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    loss.backward()
    expected.backward()
    for name, module in (("words", plain.words), ("kinds_kind", plain.kinds["kind"])):
        torch.testing.assert_close(weights[name].grad, module.weight.grad, msg=name)
    torch.testing.assert_close(model.score.weight.grad, plain.score.weight.grad)
    assert {name for name, _ in model.named_parameters()} == {"score.weight", "score.bias"}


def test_recording_takes_no_random_numbers() -> None:
    """Else dropout would differ from the peers that record nothing."""
    model = Words()
    emptied = Emptied(model, find_tables(model))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    emptied.record(lambda: model(*batch()))
    assert torch.equal(torch.rand(1), expected)


def test_a_table_without_look_up_has_no_ids() -> None:
    """A batch need not touch every table."""
    ids = ids_of([], "words")
    assert ids.dtype == torch.long
    assert len(ids) == 0


def test_look_ups_that_were_not_recorded_are_refused() -> None:
    """Rows of other ids would be wrong numbers in silence."""
    model = Words()
    tables = find_tables(model)
    emptied = Emptied(model, tables)
    ids, kinds, others = batch()
    lookups = emptied.record(lambda: model(ids, kinds, others))
    weights: dict[str, Tensor] = {table.name: table.weight for table in tables}
    with (
        pytest.raises(RuntimeError, match="Another look-up in 'words'"),
        emptied.rows(lookups, fetched(tables, lookups, weights)),
    ):
        model(ids + 1, kinds, others)


def test_missing_look_ups_are_refused() -> None:
    """The step was another one than was recorded."""
    model = Words()
    tables = find_tables(model)
    emptied = Emptied(model, tables)
    lookups = emptied.record(lambda: model(*batch()))
    weights: dict[str, Tensor] = {table.name: table.weight for table in tables}
    with (
        pytest.raises(RuntimeError, match="2 look-ups that were recorded did not come"),
        emptied.rows(lookups, fetched(tables, lookups, weights)),
    ):
        model.words(batch()[0])


class Tied(nn.Module):
    """Two modules with one weight; another weight that an ``nn.Linear`` owns too."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(7, 4), nn.Embedding(7, 4)
        self.target.weight = self.source.weight
        self.output_words = nn.Embedding(9, 4)
        self.output = nn.Linear(4, 9, bias=False)
        self.output.weight = self.output_words.weight


def test_modules_that_share_a_weight_are_one_table_and_tied_ones_none() -> None:
    """A softmax makes the gradient dense: such a weight stays in the data-parallel part."""
    [table] = find_tables(Tied())
    assert table.name == "source"
    assert list(table.modules) == ["source", "target"]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_without_counterpart_are_refused(option: dict) -> None:
    """They would train something else."""
    with pytest.raises(NotImplementedError, match="max_norm or scale_grad_by_freq"):
        find_tables(nn.Sequential(nn.Embedding(4, 2, **option)))
