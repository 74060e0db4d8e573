"""Checkpoints of divided parameters: the ones of one device, which any other division goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.sharded_runs import MODELS, Weights, divide_pair
from tests.support.trainer_runs import QUIET, quiet

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "parallelize": divide_pair},
    "parameters": {"data_parallel_size": 2, "shard_optimizer": "parameters", "save_distributed_checkpoint": True},
}
OTHER = {"tensor": "parameters", "parameters": "tensor"}
COMMON = {"micro_batches": 2, "compare_losses": False}


def fit(strategy: Any, devices: int, epochs: int, ckpt_path: Path | None = None, save: Path | None = None) -> Any:
    """Train with the same batches on every replica; returns the weights, and the loss of the last validation."""
    quiet()
    entry = MODELS["pairs"]
    module = entry.build()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **QUIET,
    )
    if save is not None:

        class Save(L.Callback):
            def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                trainer.save_checkpoint(save)  # while parameters are whole, for the evaluation

        trainer.callbacks.append(Save())
    batches = oracle.loader(entry.batches(1))
    trainer.fit(module, batches, oracle.loader(entry.batches(1)), ckpt_path=ckpt_path, weights_only=False)
    return oracle.state_of(module), float(trainer.callback_metrics["val_loss"])


def fit_divided(process: int, save: Path, ckpt_path: Path | None = None, tensor: int = 2) -> dict[str, Any]:
    """Train with Lightning's `ModelParallelStrategy`: an epoch, or on to the second one."""
    quiet()
    entry, weights = MODELS["divides_itself"], Weights()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 * tensor,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=tensor),
        max_epochs=1 if ckpt_path is None else 2,
        use_distributed_sampler=False,
        callbacks=[weights],
        num_sanity_val_steps=0,
        **QUIET,
    )
    batches, held_out = oracle.loader(entry.batches(1)), oracle.loader(entry.batches(1))
    trainer.fit(entry.build(), batches, held_out, ckpt_path=ckpt_path, weights_only=False)
    trainer.save_checkpoint(save)
    return weights.found


def fit_and_test_anew(folder: Path, ranks: int) -> tuple[str, float]:
    """A module that divides itself: what a second run says, and what it gives with a new module and a checkpoint."""
    from lightning_pipe import PipeStrategy

    entry, path = MODELS["divides_itself"], folder / "divided.ckpt"
    module = entry.build()
    sizes: dict[str, Any] = {"pipeline_parallel_size": ranks, "tensor_parallel_size": 2}
    strategy = PipeStrategy(**COMMON, **sizes, save_distributed_checkpoint=True)
    options: Any = {"accelerator": "cpu", "devices": 2 * ranks, "use_distributed_sampler": False, **QUIET}
    trainer = L.Trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **options)
    trainer.fit(module, oracle.loader(entry.batches(1)))
    trainer.save_checkpoint(path)
    tested = trainer.test(entry.build(), oracle.loader(entry.batches(1)), path, verbose=False, weights_only=False)
    try:
        trainer.test(module, oracle.loader(entry.batches(1)), verbose=False)
    except ConfigurationError as error:
        return str(error), tested[0]["test_loss"]
    return "", 0.0


def go_on(process: int, folder: str, ranks: int) -> dict[str, Any]:
    """Train an epoch in each layout and save, then another one in the other layout."""
    from lightning_pipe import PipeStrategy

    place, found = Path(folder), {}
    for name, options in LAYOUTS.items():
        strategy = PipeStrategy(pipeline_parallel_size=ranks, stages=2, **COMMON, **options)
        found[f"{name} 1"] = fit(strategy, 2 * ranks, 1, save=place / f"{name}.ckpt")
    for name, options in LAYOUTS.items():
        strategy = PipeStrategy(pipeline_parallel_size=ranks, stages=2, **COMMON, **options)
        found[f"{name} 2"] = fit(strategy, 2 * ranks, 2, ckpt_path=place / f"{OTHER[name]}.ckpt")
    lightning = fit_divided(process, place / "on.ckpt", ckpt_path=place / "parameters.ckpt", tensor=ranks)
    found["lightning 2"] = lightning, None
    found["anew"] = fit_and_test_anew(place, ranks)
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", slow_but([1, 2], 1))
def test_checkpoints_are_those_of_one_device(ranks: int, tmp_path: Path) -> None:
    found = run_trainers(go_on, 2 * ranks, folder=str(tmp_path), ranks=ranks, timeout=130)
    expected = {
        epochs: fit("auto", 1, epochs, save=tmp_path / "one.ckpt" if epochs == 1 else None) for epochs in (1, 2)
    }
    for of_process in found:
        refused, tested = of_process.pop("anew")
        assert "goes on in a new one, from a checkpoint" in refused
        assert oracle.close(tested, expected[1][1])
        for name, (weights, tested) in of_process.items():
            truth, loss = expected[int(name[-1])]
            assert oracle.differences(oracle.Trace(weights=weights), oracle.Trace(weights=truth)) == [], name
            assert tested is None or oracle.close(tested, loss)
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


def on_eight(
    process: int, epochs: int, ckpt_path: Path | None = None, save: Path | None = None, *, folder: bool = True
) -> Any:
    """Two stages of two replicas of two tensor ranks, which write folders or ordinary files."""
    from lightning_pipe import PipeStrategy

    sizes: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, **LAYOUTS["tensor"]}
    options = {"shard_optimizer": "parameters", "save_distributed_checkpoint": folder, "micro_batches": 2}
    return fit(PipeStrategy(**sizes, **options), 8, epochs, ckpt_path, save)


def on_four(process: int, ckpt_path: Path, save: Path) -> dict[str, Any]:
    """Four stages go on from a folder, and so does Lightning's strategy, which then writes one of its own."""
    from lightning_pipe import PipeStrategy

    stages = PipeStrategy(pipeline_parallel_size=4, micro_batches=2, save_distributed_checkpoint=True)
    return {
        "stages": fit(stages, 4, 2, ckpt_path, save.with_suffix(".stages"))[0],
        "lightning": fit_divided(process, save.with_suffix(".on"), ckpt_path),
        "first": fit_divided(process, save),
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_folders_and_files_of_three_dimensions(tmp_path: Path) -> None:
    from lightning_pipe import PipeStrategy

    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    first = run_trainers(on_eight, 8, epochs=1, save=ours, timeout=150)
    four = run_trainers(on_four, 4, ckpt_path=ours, save=theirs, timeout=150)
    second = run_trainers(on_eight, 8, epochs=2, ckpt_path=theirs, timeout=150)
    third = run_trainers(on_eight, 8, epochs=3, ckpt_path=theirs.with_suffix(".stages"), timeout=150)
    one = fit(PipeStrategy(pipeline_parallel_size=1, micro_batches=2), 1, 2, ours)
    truth = {epochs: fit("auto", 1, epochs, save=tmp_path / f"{epochs}.ckpt")[0] for epochs in (1, 2, 3)}
    file = tmp_path / "file.ckpt"
    ordinary = run_trainers(on_eight, 8, epochs=2, ckpt_path=tmp_path / "1.ckpt", save=file, folder=False, timeout=150)
    found = [(1, weights) for weights, _ in first] + [(2, weights) for weights, _ in (*second, one, *ordinary)]
    found += [(3, weights) for weights, _ in (*third, fit("auto", 1, 3, file))]
    for of_process in four:
        found += [(1, of_process["first"]), (2, of_process["stages"]), (2, of_process["lightning"])]
    for epochs, weights in found:
        oracle.assert_equal(oracle.Trace(weights=weights), oracle.Trace(weights=truth[epochs]))
