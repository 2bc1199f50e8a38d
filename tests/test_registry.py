"""Names in both namespaces of Lightning, whatever the program imports first, and without side effects on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_embrace
import lightning_embrace.pytorch_lightning
from lightning_embrace.namespaces import LIGHTNING, PYTORCH_LIGHTNING, Namespace
from lightning_embrace.registry import register

NAMES = {"embrace": "popen", "embrace_spawn": "spawn", "embrace_fork": "fork", "embrace_notebook": "fork"}
STRATEGIES: dict[Namespace, Any] = {
    LIGHTNING: lightning_embrace.EmbRaceStrategy,
    PYTORCH_LIGHTNING: lightning_embrace.pytorch_lightning.EmbRaceStrategy,
}
BOTH = pytest.mark.parametrize("namespace", list(STRATEGIES), ids=lambda n: n.name)


@BOTH
def test_names(namespace: Namespace) -> None:
    """Registering again is harmless, and each name starts processes its own way with the namespace's own class."""
    registry = namespace.get("strategies.StrategyRegistry")
    before = dict(registry)
    register()
    assert dict(registry) == before
    for name, start_method in NAMES.items():
        strategy = registry.get(name)
        assert type(strategy) is STRATEGIES[namespace]
        assert isinstance(strategy, namespace.get("strategies.ParallelStrategy"))
        assert strategy.config.start_method == start_method


@BOTH
def test_a_strategy_of_the_other_namespace(namespace: Namespace) -> None:
    """The two namespaces' classes do not know each other; the error must say which import to change."""
    trainer = namespace.get("Trainer")
    (strategy,) = [cls() for other, cls in STRATEGIES.items() if other is not namespace]
    with pytest.raises(ValueError, match="invalid strategy") as raised:
        trainer(strategy=strategy, accelerator="cpu", logger=False)
    own_module = {"lightning.pytorch": "lightning_embrace"}.get(namespace.name, "lightning_embrace.pytorch_lightning")
    assert f"for the Trainer of {strategy.namespace.name};" in str(raised.value)
    assert f"for that of {namespace.name}: from {own_module} import EmbRaceStrategy>" in str(raised.value)


# Each line runs in a fork of one process that has imported torch already, and prints what it found.
ORDERS = {
    "alone": "import lightning_embrace",
    "after pytorch_lightning": "import pytorch_lightning; import lightning_embrace",
    "after both": "import pytorch_lightning, lightning.pytorch; import lightning_embrace",
    "own logger": "import lightning.pytorch; rank_zero.log = logging.getLogger('mine'); import lightning_embrace",
    "used": (
        "import lightning_embrace, pytorch_lightning;"
        "pytorch_lightning.Trainer(strategy='embrace', accelerator='cpu', devices=1, logger=False)"
    ),
    "own logger, used": (
        "import lightning_embrace, pytorch_lightning; rank_zero.log = logging.getLogger('mine');"
        "pytorch_lightning.Trainer(strategy='embrace', accelerator='cpu', devices=1, logger=False)"
    ),
    "broken": (
        "sys.path.insert(0, broken)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import lightning_embrace\n"
        "found['warned'] = [str(w.message) for w in caught if 'lightning_embrace' in str(w.message)]"
    ),
}
SCRIPT = """
import json, logging, os, sys, warnings
import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torchmetrics  # all that is slow to import
from lightning_utilities.core import rank_zero

warnings.simplefilter("ignore")
broken = sys.argv[1]
for name, line in json.loads(sys.argv[2]).items():
    pid = os.fork()
    if pid == 0:
        found = {}
        try:
            exec(line)
            found["log"] = rank_zero.log.name
            found["category"] = rank_zero.rank_zero_deprecation_category.__module__
            for module in ("lightning.pytorch", "pytorch_lightning"):
                strategies = sys.modules.get(module + ".strategies")
                found[module] = strategies is not None and "embrace" in strategies.StrategyRegistry
            print(json.dumps([name, found]), flush=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    broken = tmp_path_factory.mktemp("site") / "pytorch_lightning"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise AttributeError('np.Inf was removed')\n")
    command = [sys.executable, "-c", SCRIPT, str(broken.parent), json.dumps(ORDERS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True, cwd=Path(__file__).parents[1])
    return dict(json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("["))


@pytest.mark.parametrize("order", [o for o in ORDERS if o != "broken"])
def test_any_order_of_imports_registers(orders: dict[str, dict[str, Any]], order: str) -> None:
    """A Trainer of either namespace knows the names, also one that is imported later."""
    assert orders[order]["lightning.pytorch"] and orders[order]["pytorch_lightning"]


@pytest.mark.parametrize(
    ("order", "log", "category"),
    [
        ("alone", "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"),
        ("after pytorch_lightning", "pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"),
        ("after both", "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"),
        ("own logger", "mine", "lightning.fabric.utilities.rank_zero"),
    ],
)
def test_import_leaves_lightnings_messages_alone(
    orders: dict[str, dict[str, Any]], order: str, log: str, category: str
) -> None:
    """Both namespaces share one logger for rank-zero messages, and each takes it over when it is imported.

    Importing the package imports both. The logger stays with what the program itself has imported, or the level that
    it has set there would mean nothing.
    """
    assert (orders[order]["log"], orders[order]["category"]) == (log, category)


def test_messages_follow_the_trainer(orders: dict[str, dict[str, Any]]) -> None:
    """Imported after this package, pytorch_lightning cannot take the logger over; its Trainer with a strategy does."""
    assert orders["used"]["log"] == "pytorch_lightning.utilities.rank_zero"
    assert orders["own logger, used"]["log"] == "mine"


def test_a_broken_second_namespace(orders: dict[str, dict[str, Any]]) -> None:
    """An old pytorch_lightning beside a new numpy raises when imported; who does not use it must not pay for that."""
    (warning,) = orders["broken"]["warned"]
    assert "pytorch_lightning" in warning and "np.Inf was removed" in warning
    assert orders["broken"]["lightning.pytorch"]
    assert orders["broken"]["log"] == "lightning.pytorch.utilities.rank_zero"
