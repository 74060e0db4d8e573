"""Checkpoints of divided parameters: the ones of one device, which any other division goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.sharded_runs import MODELS, divide_pair
from tests.support.trainer_runs import QUIET, quiet

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "parallelize": divide_pair},
    "parameters": {"data_parallel_size": 2, "shard_optimizer": "parameters", "save_distributed_checkpoint": True},
}
OTHER = {"tensor": "parameters", "parameters": "tensor"}


def fit(strategy: Any, devices: int, epochs: int, ckpt_path: Path | None = None, save: Path | None = None) -> Any:
    """Train with the same batches on every replica; returns the weights, and those that a validation has seen."""
    quiet()
    entry = MODELS["pairs"]
    module = entry.build()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        **QUIET,
    )
    if save is not None:

        class Save(L.Callback):
            def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                trainer.save_checkpoint(save)  # while parameters are whole, for the evaluation

        trainer.callbacks.append(Save())
    batches = oracle.loader(entry.batches(3))
    trainer.fit(module, batches, oracle.loader(entry.batches(1)), ckpt_path=ckpt_path, weights_only=False)
    tested = trainer.test(module, oracle.loader(entry.batches(2)), verbose=False)
    return oracle.state_of(module), tested[0]["test_loss"]


def go_on(process: int, folder: str) -> dict[str, Any]:
    """Train an epoch in each layout and save, then another one in the other layout."""
    from lightning_pipe import PipeStrategy

    place, found = Path(folder), {}
    for name, options in LAYOUTS.items():
        strategy = PipeStrategy(pipeline_parallel_size=2, micro_batches=2, **options)
        found[f"{name} 1"] = fit(strategy, 4, 1, save=place / f"{name}.ckpt")
    for name, options in LAYOUTS.items():
        strategy = PipeStrategy(pipeline_parallel_size=2, micro_batches=2, **options)
        found[f"{name} 2"] = fit(strategy, 4, 2, ckpt_path=place / f"{OTHER[name]}.ckpt")
    return found


@pytest.mark.timeout(150)
def test_checkpoints_are_those_of_one_device(tmp_path: Path) -> None:
    found = run_trainers(go_on, 4, folder=str(tmp_path), timeout=130)
    expected = {
        epochs: fit("auto", 1, epochs, save=tmp_path / "one.ckpt" if epochs == 1 else None) for epochs in (1, 2)
    }
    for of_process in found:
        for name, (weights, tested) in of_process.items():
            truth, loss = expected[int(name[-1])]
            oracle.assert_equal(oracle.Trace(weights=weights), oracle.Trace(weights=truth))
            assert oracle.close(tested, loss)
    one, written = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("one", "tensor"))
    oracle.assert_equal(oracle.Trace(weights=written["state_dict"]), oracle.Trace(weights=one["state_dict"]))
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (one, written)]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert all(type(value) is torch.Tensor for value in states[1][index].values())
        oracle.assert_equal(oracle.Trace(weights=states[1][index]), oracle.Trace(weights=state))
    # one device goes on from what tensor ranks have written
    weights, _ = fit("auto", 1, 2, ckpt_path=tmp_path / "tensor.ckpt")
    oracle.assert_equal(oracle.Trace(weights=weights), oracle.Trace(weights=expected[2][0]))
