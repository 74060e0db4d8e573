"""After a run each rank keeps its share of a large module: later runs go on with it, and gathering is asked for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipe import PipeStrategy
from lightning_pipe.engine.partitioned_module import PartitionedModule
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.releasing import named_tensors
from tests.support import oracle
from tests.support.lit_modules import Data, Lit
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

LINE = "trainer.strategy.whole_module()"


@contextmanager
def gathered() -> Iterator[list[str]]:
    """What is sent to ranks that do not hold it."""
    names: list[str] = []
    fetch = PartitionedModule._fetch

    def counted(self: Any, name: str, *rest: Any) -> Any:
        names.append(name)
        return fetch(self, name, *rest)

    PartitionedModule._fetch = counted  # type: ignore[method-assign]
    try:
        yield names
    finally:
        PartitionedModule._fetch = fetch  # type: ignore[method-assign]


def trainer_of(devices: int | None, **options: Any) -> L.Trainer:
    strategy: Any = PipeStrategy(**{"micro_batches": 1, "gather_limit": 0, **options}) if devices else "auto"
    # a metric that was reset in inference mode cannot be updated in training (torchmetrics 1.4)
    quiet = {**QUIET, "inference_mode": False, "num_sanity_val_steps": 0}
    return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, max_epochs=1, **quiet)


def several_runs(devices: int | None, folder: Path) -> dict[str, Any]:
    """Validate, fit, test and fit again with one module, then save it; and fit once more with another Trainer."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, data = Lit().double(), Data(16)
    found: dict[str, Any] = {}
    with gathered() as names:
        trainer = trainer_of(devices)
        trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        found["absent"] = sum(isinstance(tensor, AbsentTensor) for _, tensor in named_tensors(module))
        found["test"] = trainer.test(module, data, verbose=False)[0]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data)
        trainer.save_checkpoint(folder / f"{devices}.ckpt")
        found["first"] = {name: p.detach().clone() for name, p in module.named_parameters() if own(p)}
        trainer = trainer_of(devices)
        trainer.fit(module, data)
    found["gathered"] = names
    found["module"], found["trainer"] = module, trainer
    return found


def own(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, AbsentTensor)


def on_rank(process: int, folder: Path) -> dict[str, Any]:
    found = several_runs(2, folder)
    module, trainer = found.pop("module"), found.pop("trainer")
    found["messages"] = list(refusals(module, trainer))
    for name, tensor in named_tensors(copy.deepcopy(module)):
        assert own(tensor) or not trainer.strategy.pipeline.holds(name)
    assert trainer.strategy.whole_module() is module
    assert trainer.strategy.whole_module() is module
    assert trainer.strategy.pipeline is None
    found["weights"] = oracle.state_of(pickle.loads(pickle.dumps(module)))
    trainer = trainer_of(2)  # divides the whole module again
    trainer.test(module, Data(), verbose=False)
    found["again"] = trainer.strategy.whole_module() is module and not any(
        isinstance(tensor, AbsentTensor) for tensor in module.parameters()
    )
    return found


class Asks(L.Callback):
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.whole_module()  # type: ignore[attr-defined]


def refusals(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """What is said to those who ask for what is not here."""
    foreign = next(p for p in module.parameters() if not own(p))
    for read in (foreign.sum().item, lambda: pickle.dumps(foreign)):
        try:
            read()
        except CutError as error:
            yield str(error)
    for other in ({"stages": 4}, {"data_parallel_size": 2}, {"balance": [4, 1]}):
        later = trainer_of(2, **other)
        try:
            later.test(module, Data(), verbose=False)
        except ConfigurationError as error:
            yield str(error)


def test_runs_go_on_with_the_shares(tmp_path: Path) -> None:
    ranks = run_trainers(on_rank, 2, timeout=90, folder=tmp_path)
    plain = several_runs(None, tmp_path)
    for found in ranks:
        assert found["gathered"] == []
        assert found["absent"] > 0
        assert found["again"]
        assert found["test"] == pytest.approx(plain["test"])
        for name, value in found["first"].items():
            torch.testing.assert_close(value, plain["first"][name], rtol=1e-9, atol=1e-9)
        oracle.assert_equal(
            oracle.Trace(weights=found["weights"]), oracle.Trace(weights=oracle.state_of(plain["module"]))
        )
        assert len(found["messages"]) == 5
        assert all(LINE in message for message in found["messages"])

    ours, theirs = (torch.load(tmp_path / f"{devices}.ckpt", weights_only=False) for devices in (2, None))
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[part], theirs[part])


@pytest.mark.parametrize("limit", [-1, True, 1.5, "1 GiB"])
def test_the_limit_is_a_number_of_bytes(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="gather_limit"):
        PipeStrategy(gather_limit=limit)


def test_asking_at_the_wrong_time() -> None:
    trainer = L.Trainer(accelerator="cpu", strategy=PipeStrategy(stages=2), callbacks=[Asks()], **QUIET)
    with pytest.raises(ConfigurationError, match="has had no module"):
        trainer.strategy.whole_module()  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="during a run"):
        trainer.test(Lit(), Data(), verbose=False)
