"""Hooks are called as on one device: all of them, in the same order, with equal arguments, in the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.support.hook_record import Call, recording
from tests.support.lit_modules import Data, Lit, dataset
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

FUNCTIONS = ("fit", "validate", "test", "predict", "resumed fit")


class InOrder(Data):
    """Not shuffled: one device that resumes begins the order of shuffled data anew, and a pipeline goes on with it."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(self.length), batch_size=self.batch_size)


def recorded(process: int, devices: int | None, folder: str) -> dict[str, list[Call]]:
    """The calls of each function, one Trainer and one module for all; then a run that is resumed."""
    from lightning_pipe import PipeStrategy

    quiet()
    calls: list[Call] = []
    kinds = {Lit: "module", Data: "data", L.Callback: "callback", InOrder: "data"}
    module, data, callback, in_order = (recording(kind, calls, owner) for kind, owner in kinds.items())
    found: dict[str, list[Call]] = {}
    for resumed in (False, True):
        L.seed_everything(7, verbose=False)
        saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=devices or 1,
            strategy=PipeStrategy(micro_batches=1, layers="model") if devices else "auto",
            callbacks=[callback(), saving],
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            check_val_every_n_epoch=1,
            **{**QUIET, "enable_checkpointing": True},
        )
        own, batches = module().double(), (in_order if resumed else data)(20)
        for name in ("resumed fit",) if resumed else FUNCTIONS[:4]:
            options: dict[str, Any] = {"datamodule": batches}
            if resumed:
                options.update(ckpt_path=Path(folder) / "epoch=0.ckpt", weights_only=False)
            elif name in ("validate", "test"):
                options["verbose"] = False
            getattr(trainer, name.removeprefix("resumed "))(own, **options)
            found[name] = list(calls)
            calls.clear()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Call]], list[dict[str, list[Call]]]]:
    one, two = (str(tmp_path_factory.mktemp(name)) for name in ("one", "two"))
    return recorded(0, None, one), run_trainers(recorded, 2, timeout=90, devices=2, folder=two)


@pytest.mark.feature("Hooks", "all hooks: their order, arguments and the Trainer's state", "works")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_sequence_is_that_of_one_device(function: str, runs: Any) -> None:
    plain, ranks = runs[0][function], [found[function] for found in runs[1]]
    assert len(plain) > 30
    for process, found in enumerate(ranks):
        if process > 0:  # data is prepared once on each node, whatever the strategy
            plain = [call for call in plain if call.name != "prepare_data"]
        for number, (ours, theirs) in enumerate(zip(found, plain, strict=False)):
            where = f"process {process}, call {number}: "
            assert ours[:2] == theirs[:2], (
                where + f"{ours[:2]} after {[c[:2] for c in found[max(0, number - 3) : number]]}"
            )
            assert ours.arguments == theirs.arguments, where + ours.name
            assert ours.state == theirs.state, where + ours.name
            assert ours.numbers == pytest.approx(theirs.numbers, rel=1e-9, abs=1e-9), where + ours.name
        assert len(found) == len(plain)
