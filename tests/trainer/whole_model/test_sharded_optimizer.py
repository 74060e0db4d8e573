"""``shard_optimizer=True`` under the Trainer: the same training, a part of the state, ordinary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support import oracle, processes
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET, quiet

CASES: dict[str, dict[str, Any]] = {
    "chimera": {"schedule": "chimera", "micro_batches": 4},
    "replicas": {"schedule": "1f1b", "data_parallel_size": 2, "micro_batches": 1},
}


def fit(process: int, name: str, folder: str) -> dict[str, int]:
    """Train two epochs in two processes with and without sharding; the first one's losses and state elements."""
    from lightning_pipe import PipeStrategy

    quiet()
    found = {}
    for sharded in (False, True):
        L.seed_everything(7, verbose=False)
        module = Lit().double()
        strategy = PipeStrategy(**CASES[name], shard_optimizer=sharded)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, gradient_clip_val=0.5, **QUIET
        )
        counts: list[int] = []

        class Count(L.Callback):
            def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                if trainer.current_epoch == 0:
                    trainer.save_checkpoint(Path(folder) / f"{name}-{sharded}-one-epoch.ckpt")  # noqa: B023

            def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                state = trainer.optimizers[0].state
                counts.append(sum(v.numel() for s in state.values() for v in s.values() if v.dim()))  # noqa: B023
                trainer.save_checkpoint(Path(folder) / f"{name}-{sharded}.ckpt")  # noqa: B023

        trainer.callbacks.append(Count())
        trainer.fit(module, datamodule=Data())
        found[sharded] = (oracle.state_of(module), counts[0])
    for key, value in found[False][0].items():
        assert torch.equal(value, found[True][0][key]), key
    return {"plain": found[False][1], "sharded": found[True][1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of every case."""
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[dict[str, int]]]:
    """A case, and what every process holds of its state."""
    return request.param, processes.run_trainers(fit, 2, timeout=100, name=request.param, folder=str(folder))


@pytest.mark.timeout(120)
def test_training_and_checkpoint_are_those_without_sharding(
    trained: tuple[str, list[dict[str, int]]], folder: Path
) -> None:
    name, results = trained
    plain = [result["plain"] for result in results]
    sharded = [result["sharded"] for result in results]
    assert sum(sharded) == plain[0] == plain[1]
    assert max(sharded) < plain[0]
    one, other = (torch.load(folder / f"{name}-{kind}.ckpt", weights_only=False) for kind in (False, True))
    for key, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][key]), key
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (one, other)]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        for key, value in state.items():
            assert torch.equal(value, states[1][index][key]), (index, key)


def resume(process: int, name: str, folder: str) -> list[dict[str, Any]]:
    """Go on with another schedule, without and with sharding."""
    return [go_on(name, folder, sharded) for sharded in (False, True)]


def go_on(name: str, folder: str, sharded: bool) -> dict[str, Any]:
    """Go on for an epoch with another schedule, from the file that ``name`` has left."""
    from lightning_pipe import PipeStrategy

    quiet()
    other = next(case for case in CASES if case != name)
    L.seed_everything(7, verbose=False)
    module = Lit().double()
    strategy = PipeStrategy(**CASES[other], shard_optimizer=sharded)
    # two pipelines need half as many steps as one, and the scheduler has so many
    options = {**QUIET, "max_epochs": 2, "limit_train_batches": 3, "gradient_clip_val": 0.5}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
    path = Path(folder) / f"{name}-True-one-epoch.ckpt"
    trainer.fit(module, datamodule=Data(), ckpt_path=path, weights_only=False)
    return oracle.state_of(module)


@pytest.mark.feature("Checkpoints", "a divided optimizer's state", "works", "goes on as an undivided one")
@pytest.mark.timeout(120)
def test_another_layout_goes_on_from_the_file(trained: tuple[str, list[dict[str, int]]], folder: Path) -> None:
    name, _ = trained
    plain, sharded = zip(*processes.run_trainers(resume, 2, timeout=100, name=name, folder=str(folder)), strict=True)
    before = torch.load(folder / f"{name}-True-one-epoch.ckpt", weights_only=False)["state_dict"]
    for key, value in plain[0].items():
        assert torch.equal(value, sharded[0][key]), key
        assert torch.equal(value, sharded[1][key]), key
    assert any(not torch.equal(value, before[key]) for key, value in plain[0].items() if key in before)
