"""Costs that `lightning-pipe profile` has measured: where they are kept, and how a run is balanced by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from lightning_pipe import CostProfile, PipeStrategy, plan
from lightning_pipe.cli import main
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.planning.layer_sizes import profile_path, stored, without_times
from lightning_pipe.profiling import processes
from lightning_pipe.transport.single_process import SingleProcess
from tests.support import oracle
from tests.support.trainer_runs import QUIET


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 8), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.dropout(self.inner(x))
        return result


class Net(L.LightningModule):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch() -> torch.Tensor:
    return torch.ones(4, 5, 8)


def told(capsys: pytest.CaptureFixture[str], balance: str = "time", precision: Any = "32-true") -> str:
    """What a run prints."""
    strategy = PipeStrategy(micro_batches=2, layers="layers", balance=balance)  # type: ignore[arg-type]
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, precision=precision, **QUIET)
    trainer.fit(Net(), oracle.loader([batch()]))
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_PIPE_CACHE", str(tmp_path))
    return tmp_path


def test_a_run_is_balanced_by_what_the_command_has_measured(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of `lightning-pipe profile` is read by a run.

    What measures in processes of its own is in tests/profiling/test_measure.py.
    """
    monkeypatch.setattr(processes, "in_processes", lambda job, ranks, device, timeout: job(SingleProcess()))
    here = "tests.planning.test_layer_sizes"
    with pytest.raises(ConfigurationError, match="has not been measured"):
        told(capsys)
    main(
        ["profile", f"{here}:Net", "--batch", f"{here}:batch", "--layers", "layers", "--sizes", "[1]", "--rounds", "1"]
    )
    (path,) = cache.iterdir()
    assert str(path) in capsys.readouterr().out
    for balance in ("time", "memory"):
        assert f"balanced by {balance}: the largest stage costs" in told(capsys, balance)
    with pytest.raises(ConfigurationError, match="precision 32-true in the profile, bf16-mixed now"):
        told(capsys, precision="bf16-mixed")
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="is no profile that can be read"):
        told(capsys)


def some_profile(net: Net, forward: float) -> CostProfile:
    none = (0.0,) * 4
    costs = SizeCosts((forward, 0, 0, forward), none, none, (4, 0, 0, 0), none)
    return CostProfile(
        "Net", without_times(net, find_layers(net, "layers")).layers, {2: costs}, conditions={"threads": "2"}
    )


def test_the_balance_follows_the_measurements() -> None:
    net = Net()
    layers = find_layers(net, "layers")
    costs = SizeCosts((3, 1, 0, 2), (6, 2, 0, 4), (3, 1, 0, 2), (10, 900, 10, 10), (0,) * 4)
    found = CostProfile("Net", without_times(net, layers).layers, {1: costs})
    assert found.layer_costs("time") == [9, 3, 0, 6]
    assert divide(net, layers, 2, "time", found.layer_costs("time")) == [1, 3]
    assert found.layer_costs("time", recompute=True) == [12, 4, 0, 8]
    weights = [4 * layer.parameter_bytes for layer in found.layers]
    once, twice = (found.layer_costs("memory", number) for number in (1, 2))
    assert once == [size + saved for size, saved in zip(weights, costs.saved_bytes, strict=True)]
    assert [b - a for a, b in zip(once, twice, strict=True)] == [10, 900, 10, 10]
    frozen = replace(found, layers=tuple(replace(each, frozen_bytes=each.parameter_bytes) for each in found.layers))
    assert frozen.layer_costs("memory", 0) == [layer.parameter_bytes for layer in found.layers]


def test_a_run_divides_memory_as_its_plan_says(cache: Path) -> None:
    net = Net()
    layers = find_layers(net, "layers")
    none = (0.0,) * 4
    costs = SizeCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (300, 0, 0, 0), none)
    found = CostProfile("Net", without_times(net, layers).layers, {1: costs})
    found.save(profile_path(net, layers))
    options: dict[str, Any] = {"schedule": "looped_bfs", "micro_batches": 8, "layers": "layers"}
    planned = plan(net, ranks=1, batch=8, profile=found, balance="memory", **options)
    strategy = PipeStrategy(balance="memory", **options)
    balances: list[Any] = []
    noting = LambdaCallback(on_train_end=lambda *_: balances.append(strategy.run.pipeline.balance))
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[noting], **QUIET)
    trainer.fit(net, oracle.loader([torch.ones(8, 5, 8)]))
    assert balances == [[len(stage.layers) for stage in planned.stages]]


def test_a_profile_is_kept_by_the_module_and_checked_for_the_conditions(cache: Path) -> None:
    net = Net()

    def load(module: nn.Module = net, **conditions: str) -> CostProfile | None:
        return stored(module, find_layers(module, "layers"), conditions)

    assert load(threads="2") is None
    path = profile_path(net, find_layers(net, "layers"))
    some_profile(net, 1).save(path)
    some_profile(net, 2).save(path)
    assert load(threads="2") == load() == some_profile(net, 2)
    with pytest.raises(ConfigurationError, match="threads 2 in the profile, 4 now"):
        load(threads="4")
    other = Net()
    other.layers.append(Layer())
    assert load(other) is None
    assert load(type("Net", (Net,), {"forward": lambda self, x: 2 * Net.forward(self, x)})()) is None, "other code"
    net.layers[0].requires_grad_(False)
    found = load()
    assert found is not None
    assert found.layers[0].frozen_bytes > 0, "the parameters are those of now"
    net.layers[0].dropout.p = 0.5  # an option, and no parameter
    assert load() is None
    assert [each.name for each in cache.iterdir()] == [path.name], "and nothing half written"
