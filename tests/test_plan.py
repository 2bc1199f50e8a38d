"""The printed plan: its numbers are the formulas, its words are the places and reasons."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_embrace.plan import TableCost, render_plan, table_cost
from lightning_embrace.tables.find import TableSpec, find_tables
from lightning_embrace.tables.usage import Usage


def _spec(place, rows=1000, columns=16, dtype=torch.float32, **more) -> TableSpec:
    parameter = nn.Parameter(torch.empty(rows, columns, dtype=dtype))
    return TableSpec("words", parameter, (rows, columns), place=place, **more)


@pytest.mark.parametrize(
    ("spec", "unique_rows", "world_size", "wire_itemsize", "cost"),
    [
        # V·D = 64,000 bytes; ring 2·(N−1)/N · 64,000; sparse (N−1)·U·(64 + 8)
        # sharded: 2·(N−1)/N·U·64 + (N−1)·U·4; memory V·ceil(D/N)·4
        (_spec("sharded"), 10, 1, None, TableCost(0, 0, 0, 64_000)),
        (_spec("sharded"), 10, 2, None, TableCost(64_000, 720, 680, 32_000)),
        (_spec("sharded"), 10, 4, None, TableCost(96_000, 2_160, 1_080, 16_000)),
        (_spec("sharded"), 10, 3, None, TableCost(85_333, 1_440, 933, 24_000)),
        (_spec("sharded"), 10, 4, 2, TableCost(96_000, 2_160, 600, 16_000)),  # bf16 on the wire
        (_spec("sharded", columns=2, dtype=torch.float64), 10, 3, None, TableCost(21_333, 480, 293, 8_000)),
        # replicated as rows: (N−1)·U·(64 + 4); dense when that is fewer bytes
        (_spec("replicated"), 10, 2, None, TableCost(64_000, 720, 680, 64_000)),
        (_spec("replicated"), 999, 2, None, TableCost(64_000, 71_928, 64_000, 64_000)),
        (_spec("dense"), 10, 2, None, TableCost(64_000, 64_000, 64_000, 64_000)),
        (_spec("frozen"), 10, 2, None, TableCost(0, 0, 0, 64_000)),
    ],
)
def test_cost(spec, unique_rows, world_size, wire_itemsize, cost):
    """Bytes that a rank sends per step, by scheme, as worked out by hand."""
    assert table_cost(spec, _rows(unique_rows), world_size, wire_itemsize) == cost


def test_cost_of_bags():
    """Where bags travel pooled, vectors count instead of rows; under ddp the rows of all ids do."""
    usage = Usage(rows=50, vectors=4, asking=60 * 4 + 4 * 4)
    # ddp sparse 1·50·(64 + 8); here 2·1/2·4·64 + 1·256
    assert table_cost(_spec("sharded"), usage, 2) == TableCost(64_000, 3_600, 512, 32_000)


def _rows(count) -> Usage:
    return Usage(count, count, count * 4)


def _printed(specs, unique_rows, world_size) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_plan(specs, unique_rows, world_size))
    return console.file.getvalue()


def test_rendered_plan():
    """Per table: its whole shape, place, reason, rows a step and bytes."""
    model = nn.ModuleDict({"words": nn.Embedding(100_000, 64), "tags": nn.Embedding(17, 4), "out": nn.Linear(2, 2)})
    (row, small) = [
        line for line in _printed(find_tables(model, "auto"), {"words": _rows(1234.0)}, 4).splitlines() if "×" in line
    ][1:]
    for text in ("words", "100,000 × 64", "sharded", "large enough to pay", "1,234", "38.4 MB", "6.4 MB"):
        assert text in row
    # 2·3/4·1234·256 + 3·1234·4 = 488,664
    assert "489 kB" in row
    for text in ("tags", "17 × 4", "replicated", "too small to pay", "–"):
        assert text in small
    assert "out" not in _printed(find_tables(model, "auto"), {}, 4).replace("without", "")


def test_rendered_plan_of_a_shard():
    """While the parameter holds a shard, the plan still shows the whole table."""
    (spec,) = find_tables(nn.ModuleDict({"words": nn.Embedding(1000, 16)}), ["*"])
    spec.parameter.data = spec.parameter.data[:, :4].clone()
    printed = _printed([spec], {"words": _rows(10.0)}, 4)
    assert "1,000 × 16" in printed
    assert "96 kB" in printed  # ddp dense: of the whole
    assert "16 kB" in printed  # memory a rank: of the shard
