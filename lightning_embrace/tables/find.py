"""Finds the embedding tables of a model and decides where each one lives. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_embrace.tables.modules import handle_of

#: tables below this many bytes cost less replicated than the latency of an exchange (``tables="auto"``)
MIN_SHARD_BYTES = 1 << 20

Place = Literal["sharded", "replicated", "dense", "frozen"]


@dataclass
class TableSpec:
    """One table of the model.

    Attributes:
        name: Name of its first module.
        parameter: Its weight; later this rank's shard of it.
        shape: V, D of the whole table.
        modules: The look-up modules that use it, by name; a module registered twice stands under both names.
        owners: Other ``module.parameter`` names that use the same weight (tying).
        sparse: ``sparse=True`` was asked for.
        place: ``"sharded"`` (column-wise over the ranks); ``"replicated"`` (whole on every rank, gradient as rows or
            dense, whichever is fewer bytes); ``"dense"`` (tied: synchronised with the dense parameters); ``"frozen"``.
        reason: Why it lives there.
        born: It was built as this rank's columns, in ``configure_model``.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, int]
    modules: dict[str, nn.Embedding | nn.EmbeddingBag] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    sparse: bool = False
    place: Place = "sharded"
    reason: str = ""
    born: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the whole table."""
        return self.shape[0] * self.shape[1] * self.parameter.element_size()

    def lookups(self) -> list[nn.Embedding | nn.EmbeddingBag]:
        """The look-up modules, each once."""
        return list(dict.fromkeys(self.modules.values()))


def find_tables(model: nn.Module, patterns: Literal["auto"] | Sequence[str]) -> list[TableSpec]:
    """Finds every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model and decides where its table lives.

    Args:
        model: The model, with full tables.
        patterns: ``"auto"``: shard what is large enough to pay. Or fnmatch patterns of module names: what they match
            is sharded whatever its size, and a pattern that begins with ``!`` excludes what it matches.

    Returns:
        One entry per table, in the order of ``named_modules``.

    Raises:
        ValueError: A pattern matches no table, or a table is not initialised or asks for what torch refuses.
    """
    specs: dict[int, TableSpec] = {}
    computed: list[str] = []
    for name, module in _named_modules(model):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            weight = module._parameters.get("weight")
            if weight is None:
                computed.append(name)
                continue
            _refuse_what_torch_refuses(name, module)
            handle = handle_of(module)
            shape = (weight.shape[0], weight.shape[1] if handle is None else handle.table.columns)
            spec = specs.setdefault(id(weight), TableSpec(name, weight, shape, born=handle is not None))
            spec.modules[name] = module
            spec.sparse = spec.sparse or module.sparse
    for name, module in _named_modules(model):
        for key, parameter in module._parameters.items():
            spec_of = specs.get(id(parameter))
            if spec_of is not None and not _is_lookup(module, key):
                spec_of.owners.append(f"{name}.{key}" if name else key)
    found = list(specs.values())
    for spec in found:
        if len({m.sparse for m in spec.modules.values()}) > 1:
            raise ValueError(
                f"Table {spec.name!r} is shared by {', '.join(spec.modules)}, of which some have sparse=True and some"
                " sparse=False. Give them the same value."
            )
        spec.place, spec.reason = _place(spec, patterns)
    _check_patterns(found, computed, patterns)
    return found


def may_be_sharded(nbytes: int, patterns: Literal["auto"] | Sequence[str]) -> bool:
    """Whether a table of which nothing but its size is known yet could turn out to be sharded."""
    if patterns == "auto":
        return nbytes >= MIN_SHARD_BYTES
    return any(not pattern.startswith("!") for pattern in patterns)


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names that they have in the user's code; torch.compile puts a module of its own in between."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield ".".join(part for part in name.split(".") if part != "_orig_mod"), module


def _is_lookup(module: nn.Module, key: str) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and key == "weight"


def _place(spec: TableSpec, patterns: Literal["auto"] | Sequence[str]) -> tuple[Place, str]:
    if spec.owners:
        return "dense", f"tied to {', '.join(spec.owners)}: its gradient is dense"
    if any(m.max_norm is not None for m in spec.modules.values()):
        return "replicated", "max_norm changes rows while they are looked up"
    if not spec.parameter.requires_grad:
        return "frozen", "frozen: nothing to synchronise"
    if patterns == "auto":
        if spec.nbytes < MIN_SHARD_BYTES:
            return "replicated", f"smaller than {MIN_SHARD_BYTES >> 20} MiB: too small to pay"
        return "sharded", "large enough to pay"
    if any(fnmatchcase(name, p[1:]) for p in patterns if p.startswith("!") for name in spec.modules):
        return "replicated", "excluded by tables="
    if any(fnmatchcase(name, p) for p in patterns for name in spec.modules):
        return "sharded", "matched by tables="
    return "replicated", "not matched by tables="


def _check_patterns(specs: list[TableSpec], computed: list[str], patterns: Literal["auto"] | Sequence[str]) -> None:
    if patterns == "auto":
        return
    names = [name for spec in specs for name in spec.modules]
    whole = f" Parametrised, so without a table to shard: {', '.join(computed)}." if computed else ""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            raise ValueError(
                f"EmbRaceStrategy(tables=...): the pattern {pattern!r} matches no embedding of the model. It has:"
                f" {', '.join(names) or 'none'}.{whole} Write names or patterns of modules, such as"
                " 'encoder.embedding' or '*embedding*'; '!name' excludes one."
            )


def _refuse_what_torch_refuses(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Torch raises these in the first backward pass; here they come before anything is sent."""
    if isinstance(module.weight, UninitializedParameter):
        raise ValueError(
            f"Table {name!r} is not initialised. Build it in `configure_model` or run a dry forward first."
        )
    if module.sparse and module.scale_grad_by_freq and module.weight.requires_grad:
        raise ValueError(f"Table {name!r}: scale_grad_by_freq is not supported with sparse=True. Set one of them.")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        for option in ("sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise ValueError(f"Table {name!r}: mode='max' is not supported with {option}=True. Set one of them.")
