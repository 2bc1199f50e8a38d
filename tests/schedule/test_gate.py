"""Every way to read a parameter comes by the gate, and the modules are as before once it is gone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, weight_norm

from lightning_embrace.schedule.gate import ParameterGate, _Gate, is_compiled


class Two(nn.Module):
    """One linear layer that uses the other one's weight past its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.one(x), self.other.weight)


class Watch:
    """A gate over a model's parameters, and which of them were read."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.all = set(self.names.values())
        self._seen: list[str] = []
        self.gate = ParameterGate(model, list(model.parameters()), self._read)

    def _read(self, parameter: Tensor) -> None:
        self._seen.append(self.names.get(id(parameter), "?"))

    def seen(self) -> set[str]:
        """Since the last call."""
        seen, self._seen = set(self._seen), []
        return seen


@pytest.fixture
def two() -> Iterator[tuple[Two, Watch]]:
    model = Two()
    watch = Watch(model)
    yield model, watch
    watch.gate.remove()


READS: dict[str, tuple[Callable[[Two], Any], set[str] | None]] = {
    "attribute": (lambda m: m.one.weight, {"one.weight"}),
    "getattr": (lambda m: getattr(m.other, "weight"), {"other.weight"}),  # noqa: B009
    "get_parameter": (lambda m: m.get_parameter("one.bias"), {"one.bias"}),
    "parameters": (lambda m: list(m.parameters()), None),
    "the first of parameters": (lambda m: next(m.parameters()), {"frozen"}),
    "named_parameters": (lambda m: dict(m.named_parameters()), None),
    "state_dict": (lambda m: m.state_dict(), None),
    "state_dict of a child": (lambda m: m.one.state_dict(), {"one.weight", "one.bias"}),
    "forward": (lambda m: m(torch.ones(1, 3)), {"one.weight", "one.bias", "other.weight"}),
    "functional": (lambda m: F.linear(torch.ones(1, 3), m.other.weight), {"other.weight"}),
    "functional_call with another's values": (
        lambda m: functional_call(m, {"one.weight": torch.zeros(3, 3)}, (torch.ones(1, 3),)),
        {"one.weight", "one.bias", "other.weight"},
    ),
    "deepcopy": (copy.deepcopy, None),
    "pickle": (lambda m: pickle.loads(pickle.dumps(m)), None),
    "torch.save": (lambda m: torch.save(m.state_dict(), io.BytesIO()), None),
    "load_state_dict": (lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}), None),
    "apply": (lambda m: m.double(), None),
    "zero_grad": (lambda m: m.zero_grad(), None),
    "requires_grad_": (lambda m: m.requires_grad_(True), None),
    "parameters_to_vector": (lambda m: nn.utils.parameters_to_vector(m.parameters()), None),
    "children": (lambda m: list(m.modules()), set()),
    "train": (lambda m: m.train(), set()),
    "the names": (lambda m: [*m.one._parameters, "bias" in m.one._parameters], set()),
}


@pytest.mark.parametrize("way", READS)
def test_read(two: tuple[Two, Watch], way: str) -> None:
    """And what reads nothing waits for nothing."""
    (model, watch), (read, expected) = two, READS[way]
    read(model)
    seen = watch.seen()
    if way == "the first of parameters" or "functional_call" in way:  # torch looks at more than it was asked for
        assert expected is not None and expected <= seen
    else:
        assert seen == (watch.all if expected is None else expected)


class Flat(nn.Module):
    """Keeps parameters in plain containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.plain = [self.layer.weight]
        self.nested = {"a": (self.layer.bias,)}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.plain[0], self.nested["a"][0])


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.some[0] + self.some[1] * self.named["a"]


def _linear_with(wrapped: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Linear(2, 2)
        wrapped(layer)
        return layer

    return make


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "LSTM": (lambda: nn.LSTM(2, 2, 2), lambda m: m(torch.ones(1, 1, 2))),
    "GRUCell": (lambda: nn.GRUCell(2, 2), lambda m: m(torch.ones(1, 2))),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda m: m(*[torch.ones(1, 1, 4)] * 3)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 4), lambda m: m(torch.ones(1, 1, 4))),
    "TransformerEncoderLayer, fast path": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval(),
        lambda m: torch.no_grad()(m)(torch.ones(1, 1, 4)),
    ),
    "BatchNorm": (lambda: nn.BatchNorm1d(2), lambda m: m(torch.ones(3, 2))),
    "plain containers": (Flat, lambda m: m(torch.ones(1, 2))),
    "ParameterList and ParameterDict": (Lists, lambda m: m(torch.ones(2))),
    "parametrize": (
        _linear_with(lambda m: parametrize.register_parametrization(m, "weight", Double())),
        lambda m: m(torch.ones(1, 2)),
    ),
    "weight_norm": (_linear_with(parametrizations.weight_norm), lambda m: m(torch.ones(1, 2))),
    "the old weight_norm": (
        _linear_with(lambda m: weight_norm(m)),
        lambda m: m(torch.ones(1, 2)),
    ),
    "spectral_norm": (_linear_with(parametrizations.spectral_norm), lambda m: m(torch.ones(1, 2))),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", MODULES)
def test_a_forward_pass_reads_all_of_its_parameters(name: str) -> None:
    make, run = MODULES[name]
    model = make()
    watch = Watch(model)
    run(model)
    assert watch.seen() == watch.all
    watch.gate.remove()
    run(model)
    assert watch.seen() == set()


def test_a_copy_is_an_ordinary_module(two: tuple[Two, Watch]) -> None:
    """Deep or pickled: reading it settles nothing, and it holds what was pending when it was made."""
    model, watch = two
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(isinstance(m._parameters, _Gate) for m in other.modules())
        watch.seen()
        assert torch.equal(other.one.weight, model.one.weight.detach())
        assert watch.seen() == {"one.weight"}
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_removal_leaves_the_modules_as_found() -> None:
    model = Two()
    lists = nn.Sequential(model, Flat(), nn.LSTM(2, 2))
    before = {name: p for name, p in lists.named_parameters()}
    hooks = {m: len(m._forward_pre_hooks) for m in lists.modules()}
    watch = Watch(lists)
    watch.gate.remove()
    assert all(type(m.__dict__["_parameters"]) is dict for m in lists.modules())
    assert {name: p for name, p in lists.named_parameters()} == before
    assert {m: len(m._forward_pre_hooks) for m in lists.modules()} == hooks
    assert watch.seen() == set()
    watch.gate.remove()


def test_parameters_that_come_and_go(two: tuple[Two, Watch]) -> None:
    """Registering, assigning and deleting while the gate is there works as without, and survives it."""
    model, watch = two
    model.one.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    model.one.nothing = None
    model.one.register_parameter("none", None)
    swapped = nn.Parameter(torch.zeros(3, 3))
    model.other.weight = swapped
    assert model.other.weight is swapped
    del model.one.bias
    assert not hasattr(model.one, "bias")
    with pytest.raises(KeyError):
        model.one._parameters["bias"]
    assert model.one._parameters.get("bias", 3) == 3
    with pytest.raises(TypeError, match="cannot assign"):
        model.one.weight = torch.zeros(1)
    watch.gate.remove()
    assert {n for n, _ in model.named_parameters()} == {"frozen", "one.weight", "one.extra", "other.weight"}
    assert model.one.none is None and model.other.weight is swapped


def test_a_value_is_applied_before_it_is_read() -> None:
    """What `before_read` writes is what the reader gets: in a forward pass, too."""
    model = Two()
    weight = model.one.weight
    pending = [True]

    def apply(parameter: Tensor) -> None:
        if parameter is weight and pending:
            pending.clear()
            parameter.data.fill_(5.0)

    gate = ParameterGate(model, [weight], apply)
    assert (model.one(torch.ones(1, 3)) - model.one.bias).mean().item() == pytest.approx(15.0, rel=1e-4)
    assert pending == []
    assert type(model.other.__dict__["_parameters"]) is dict, "a module without a watched parameter is left alone"
    gate.remove()


class Compiled(nn.Module):
    """Keeps compiled code in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Two()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Decorated(Compiled):
    """Its forward is compiled where it is written."""

    forward = torch.compile(Compiled.forward, backend="eager")


class Excepted(Compiled):
    """Its forward is what torch.compile is kept out of."""

    forward = torch.compiler.disable(Compiled.forward)


def _in_place() -> nn.Module:
    model = Compiled()
    model.compile(backend="eager")
    return model


def _method() -> nn.Module:
    model = Compiled()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "torch.compile(module)": lambda: torch.compile(Compiled(), backend="eager"),  # type: ignore[dict-item, return-value]
    "module.compile()": _in_place,
    "a method": _method,
    "a decorator": Decorated,
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_parts_have_no_gate(way: str) -> None:
    """Their graphs read parameters past it, and torch.compile could not trace a module that has one."""
    torch._dynamo.reset()  # graphs of other tests would do
    part = WAYS[way]()
    model = nn.Sequential(part, nn.Linear(3, 3))
    assert is_compiled(part) and not is_compiled(model) and not is_compiled(model[1])
    gate = ParameterGate(model, list(model.parameters()), lambda _: None)
    assert not any(isinstance(m.__dict__["_parameters"], _Gate) for m in part.modules())
    assert isinstance(model[1].__dict__["_parameters"], _Gate)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model(torch.ones(1, 3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    gate.remove()


def test_what_is_not_compiled() -> None:
    """Kept out of torch.compile, or an ordinary function of a module's."""
    model = Excepted()
    model.act = torch.tanh  # type: ignore[assignment]
    assert not is_compiled(model) and not is_compiled(Flat())


def test_a_compiled_function_sees_what_is_applied_before_it_reads() -> None:
    """No module keeps it, so the gate is there: every call comes by, not only the one that traces."""
    model = Two()
    weight, values = model.one.weight, [0.0]

    def apply(parameter: Tensor) -> None:
        if parameter is weight:
            values.append(values[-1] + 1.0)
            parameter.data.fill_(values[-1])

    gate = ParameterGate(model, [weight], apply)

    @torch.compile(backend="eager")
    def outside(module: Two, x: Tensor) -> Tensor:
        return F.linear(x * 2, module.one.weight).sum()

    for _ in range(4):
        before = values[-1]
        assert outside(model, torch.ones(1, 3)).item() == 18 * values[-1] > 18 * before
    gate.remove()
