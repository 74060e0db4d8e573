"""What Lightning and its users do around batches that are in flight, against the papers' closed forms."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from tests.support.asynchronous_engine import Batch, batches, pipedream, two_versions
from tests.support.asynchronous_trainer import (
    BATCHES,
    EPOCH,
    Feed,
    Lit,
    Outcome,
    assert_close,
    assert_weights,
    closed_form,
    learning_rate,
    run_all,
)
from tests.support.pairs import asked, slow_but

PIPEDREAM = {"schedule": "pipedream", "layers": "net.layers"}
MANY = [{name: value.double() for name, value in batch.items()} for batch in batches(12, rows=(8, 8, 5, 8, 4))]


RUNS: dict[str, dict[str, Any]] = {}
"""What tests look at: runs of the same two processes."""
UNSEEN = {"limit_val_batches": 0}
"""Where nobody looks at validations."""
Found = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path) -> Found:
    left = {f"signalled {between}" for between in {False, True}.difference(asked(request, "between"))}
    runs = {**RUNS, **those_that_save(folder)}
    return run_all({name: {"strategy": PIPEDREAM, **options} for name, options in runs.items() if name not in left})


def those_that_save(folder: Path) -> dict[str, dict[str, Any]]:
    """The last one fails."""
    long = {"trainer": {"max_epochs": 2, "val_check_interval": 5}, "module": Long}
    steps = ModelCheckpoint(folder / "steps", filename="{step}", save_top_k=-1, every_n_train_steps=3)
    on_exception = OnExceptionCheckpoint(str(folder / "failed"))
    return {
        "24 batches": {**long, "saves": (str(folder), [9])},
        "resumed": {**long, "resume": str(folder / "9.ckpt")},
        "names": {"trainer": {"enable_checkpointing": True}, "callbacks": [steps]},
        "fails": {"trainer": {"enable_checkpointing": True}, "module": Fails, "callbacks": [on_exception]},
    }


# ------------------------------------------------------------------ 24 batches


class Long(Lit):
    def train_dataloader(self) -> Any:
        return Feed(MANY)

    def val_dataloader(self) -> Any:
        return Feed(MANY[:1])


def test_24_batches_with_validation_a_checkpoint_and_resuming(found: Found) -> None:
    drains = [5, 9, 10, 12, 17, 22, 24]
    losses, evaluated, values = closed_form([*range(12)] * 2, 2, pipedream(2), drains, data=MANY)
    for outcomes, start in ((found["24 batches"], 0), (found["resumed"], 9)):
        assert_weights(outcomes, values)
        for outcome in outcomes:
            assert outcome.steps == 24
            assert_close(outcome.logged["train_loss_step"], losses[start:])
            assert_close(outcome.logged["val_loss"], [evaluated[i] for i in (0, 2, 4, 5)][start // 5 :])


# ------------------------------------------------------------------ the optimizer


class ByValue(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_value_(self.param_groups[0]["params"], 0.02)
        super().step(closure)


class ByNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        super().step(closure)


class ClipsStages(Lit):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        own = [parameter for parameter in self.parameters() if parameter.grad is not None]
        torch.nn.utils.clip_grad_norm_(own, 0.05)


RUNS["by value"] = {"trainer": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", **UNSEEN}}
RUNS["by norm"] = {"module": ClipsStages, "trainer": UNSEEN}


@pytest.mark.parametrize(("name", "kind"), [("by value", ByValue), ("by norm", ByNorm)])
def test_clipping_by_value_and_of_every_stage_by_itself(name: str, kind: type[torch.optim.SGD], found: Found) -> None:
    clipped = partial(kind, lr=learning_rate(0), momentum=0.9)
    _, _, values = closed_form(range(EPOCH), 2, pipedream(2), [], optimizer=clipped)
    assert_weights(found[name], values)
    _, _, plain = closed_form(range(EPOCH), 2, pipedream(2), [])
    assert any(float((plain[name] - values[name]).abs().max()) > 1e-3 for name in values)


class WarmsUp(Lit):
    """As Lightning's documentation does it; a scheduler takes over."""

    @staticmethod
    def rate(step: int) -> float:
        return 0.1 if step < 5 else learning_rate(step)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if self.trainer.global_step < 3:
            optimizer.param_groups[0]["lr"] = 0.02 * (self.trainer.global_step + 1)
        optimizer.step(closure=closure)


RUNS["warms up"] = {"module": WarmsUp, "trainer": UNSEEN}


def test_a_rate_set_around_a_step_is_that_of_its_batch(found: Found) -> None:
    def rate(step: int) -> float:
        return 0.02 * (step + 1) if step < 3 else WarmsUp.rate(step)

    _, _, values = closed_form(range(EPOCH), 2, pipedream(2), [], rate=rate)
    assert_weights(found["warms up"], values)


class WarmsUpNext(Lit):
    """As Lightning's documentation does it: behind a step, for the next one."""

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        if self.trainer.global_step < 4:
            optimizer.param_groups[0]["lr"] = 0.02 * (self.trainer.global_step + 1)


RUNS["warms up the next"] = {"module": WarmsUpNext, "trainer": UNSEEN}


def test_a_rate_set_behind_a_step_is_that_of_the_next_step(found: Found) -> None:
    def rate(step: int) -> float:
        return 0.02 * min(step, 4) if step else 0.1

    _, _, values = closed_form(range(EPOCH), 2, pipedream(2), [], rate=rate)
    assert_weights(found["warms up the next"], values)


class StepsOnEven(torch.optim.SGD):
    batches = 0

    def step(self, closure: Any = None) -> None:
        self.batches += 1
        if self.batches % 2:
            super().step(closure)


class Chooses(Lit):
    """Lets every second batch step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        else:
            closure()
        self.seen.append(f"at {self.trainer.global_step}")


RUNS["chooses"] = {"module": Chooses, "trainer": UNSEEN}


def test_hooks_of_the_optimizer_get_the_number_of_the_batch_that_steps(found: Found) -> None:
    chosen = partial(StepsOnEven, lr=learning_rate(0), momentum=0.9)
    _, _, values = closed_form(range(EPOCH), 2, pipedream(2), [], optimizer=chosen)
    assert_weights(found["chooses"], values)
    for outcome in found["chooses"]:
        assert outcome.steps == EPOCH
        assert [seen for seen in outcome.seen if seen.startswith("at")] == [f"at {i}" for i in range(EPOCH)]


class Anneals(Lit):
    """The weight of the loss follows the number of steps."""

    rate = staticmethod(lambda step: 0.1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.trainer.global_step)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


TWO_VERSIONS = {"schedule": "pipedream_2bw", "layers": "net.layers", "micro_batches": 4, "balance": [3, 3]}
RUNS["anneals"] = {"module": Anneals, "trainer": UNSEEN, "strategy": TWO_VERSIONS}


def test_a_step_sees_the_number_of_steps_before_its_batch(found: Found) -> None:
    plain = partial(torch.optim.SGD, lr=0.1)
    rate = lambda step: 0.1 * (1 + step)  # noqa: E731
    _, _, values = closed_form(range(EPOCH), 2, two_versions, [], 4, optimizer=plain, rate=rate)
    assert_weights(found["anneals"], values)


class SetsRate(Lit):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


RUNS["sets rate"] = {"module": SetsRate, "trainer": UNSEEN}


def test_a_step_may_not_set_the_rate_of_other_batches(found: Found) -> None:
    assert all("changes a setting of an optimizer" in outcome.error for outcome in found["sets rate"])


class Halves(Lit):
    """Schedulers of epochs, by number and by what was logged."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss_epoch"}}


RUNS["halves"] = {"trainer": {"max_epochs": 3, "limit_train_batches": 3, **UNSEEN}, "module": Halves}


def test_a_scheduler_that_looks_at_an_epoch(found: Found) -> None:
    def rate(step: int) -> float:
        return 0.1 if step < 6 else 0.05

    _, _, values = closed_form([0, 1, 2] * 3, 2, pipedream(2), [3, 6], rate=rate)
    assert_weights(found["halves"], values)


# ------------------------------------------------------------------ files


def test_files_are_named_after_the_steps_that_are_in_them(found: Found, folder: Path) -> None:
    files = {path.stem: torch.load(path, weights_only=False) for path in (folder / "steps").glob("*.ckpt")}
    drains = sorted({EPOCH, *(checkpoint["global_step"] for checkpoint in files.values())})
    assert len(files) >= 2
    for name, checkpoint in files.items():
        steps = checkpoint["global_step"]
        assert name == f"step={steps}"
        _, _, values = closed_form(range(steps), 2, pipedream(2), drains)
        for key, value in values.items():
            torch.testing.assert_close(checkpoint["state_dict"][f"net.{key}"], value, rtol=1e-12, atol=1e-12)
    _, _, values = closed_form(range(EPOCH), 2, pipedream(2), drains)
    assert_weights(found["names"], values)


class SavesInStep(Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint("never.ckpt")


RUNS["saves in step"] = {"module": SavesInStep, "trainer": UNSEEN}


def test_a_checkpoint_within_a_step_is_refused(found: Found) -> None:
    for outcome in found["saves in step"]:
        assert "within the step of a batch" in outcome.error
        assert "on_train_batch_end" in outcome.error


# ------------------------------------------------------------------ the end


RUNS["stops early"] = {
    "trainer": {"max_epochs": 3, "val_check_interval": 3},
    "callbacks": [EarlyStopping("val_loss", min_delta=10.0, patience=1)],
}


def test_early_stopping_after_a_validation(found: Found) -> None:
    _, _, values = closed_form(range(6), 2, pipedream(2), [3])
    assert_weights(found["stops early"], values)
    assert [outcome.steps for outcome in found["stops early"]] == [6, 6]


class Fails(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and self.trainer.global_rank == 1:
            raise RuntimeError("the disk is full")


def test_a_hook_that_fails_ends_all_ranks_and_drains_nothing(found: Found, folder: Path) -> None:
    assert all("the disk is full" in outcome.error for outcome in found["fails"])
    assert not (folder / "failed").exists()


class Signalled(L.Callback):
    """Process 0 gets a termination signal: while a batch is trained, or between batches."""

    def __init__(self, *, between: bool) -> None:
        self.between = between

    def on_train_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        vars(loop)["on_iteration_done"] = lambda: self.signal(trainer, self.between)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.signal(trainer, not self.between)

    def signal(self, trainer: Any, now: bool) -> None:
        if now and trainer.global_rank == 0 and trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


for between in (False, True):
    RUNS[f"signalled {between}"] = {"trainer": {"max_epochs": 3, **UNSEEN}, "callbacks": [Signalled(between=between)]}


@pytest.mark.parametrize("between", slow_but([False, True], False))
def test_a_termination_signal_ends_all_ranks(between: bool, found: Found) -> None:
    outcomes = found[f"signalled {between}"]
    assert [outcome.error for outcome in outcomes] == ["SIGTERMException"] * 2
    assert [outcome.extra for outcome in outcomes] == [4, 4]  # it goes along with the report of the next call


# ------------------------------------------------------------------ logs and state


class LogsAtEnd(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("number", float(batch_idx), on_step=True)

    def on_train_end(self) -> None:
        self.extra = self.trainer.logger.of("number")


RUNS["logs at end"] = {"module": LogsAtEnd, "trainer": {"max_epochs": 2, **UNSEEN}}


def test_what_a_hook_logs_for_a_batch_is_logged_once(found: Found) -> None:
    for outcome in found["logs at end"]:
        assert outcome.extra == [*range(EPOCH)] * 2


class Keeps(Lit):
    """A metric, a list, more than a loss, and a loader that does not know its length."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric().double()
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.net(**batch)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.losses.append(float(loss))
        return {"loss": loss, "rows": torch.full((len(batch["x"]),), batch_idx)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = outputs.get("rows")
        self.seen.append("-" if rows is None else str(int(rows[0])))

    def on_train_epoch_end(self) -> None:
        self.extra = (self.losses, self.seen, float(self.trainer.callback_metrics["mean_epoch"]))

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), batch_size=None)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


RUNS["keeps"] = {"module": Keeps, "trainer": UNSEEN}


def test_what_steps_keep_is_on_all_ranks(found: Found) -> None:
    losses, _, values = closed_form(range(EPOCH), 2, pipedream(2), [])
    assert_weights(found["keeps"], values)
    for outcome in found["keeps"]:
        kept, batches_seen, mean = outcome.extra
        torch.testing.assert_close(torch.tensor(kept), torch.tensor(losses), rtol=1e-12, atol=1e-12)
        assert_close([mean], [sum(losses) / EPOCH])
        # what a call returns is that of the batch whose loss came out
        assert [seen for seen in batches_seen if seen.isdigit()] == [str(index) for index in range(EPOCH - 1)]


class Skips(Lit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


RUNS["skips"] = {"trainer": {"max_epochs": 2, **UNSEEN}, "module": Skips}


def test_an_epoch_that_a_hook_ends(found: Found) -> None:
    losses, _, values = closed_form(
        [0, 1, 2, 3] * 2, 2, pipedream(2), [4], rate=lambda step: learning_rate(step + step // 4)
    )
    assert_weights(found["skips"], values)
    for outcome in found["skips"]:
        assert_close(outcome.logged["train_loss_step"], losses)


class StopsSoon(Lit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = True


RUNS["stops soon"] = {"module": StopsSoon, "trainer": {"min_steps": EPOCH + 2, "max_epochs": 3, **UNSEEN}}


def test_the_least_number_of_steps(found: Found) -> None:
    assert [outcome.steps for outcome in found["stops soon"]] == [EPOCH + 2] * 2


class Floats(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step({name: value.float() for name, value in batch.items()}, batch_idx)


RUNS["bfloat16"] = {"trainer": {"precision": "bf16-mixed", **UNSEEN}, "module": Floats}


def test_bfloat16(found: Found) -> None:
    _, _, exact = closed_form(range(EPOCH), 2, pipedream(2), [])
    for outcome in found["bfloat16"]:
        assert not outcome.error
        differences = [float((outcome.values[name] - value).abs().max()) for name, value in exact.items()]
        assert 1e-4 < max(differences) < 0.05


class Averages(EMAWeightAveraging):
    """Lets the module have the number of steps that are in the average."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        lit, average = cast("Averaged", pl_module), self._average_model
        assert average is not None
        lit.extra = int(average.n_averaged)
        super().on_train_end(trainer, pl_module)


class Averaged(Lit):
    def configure_callbacks(self) -> list[L.Callback]:
        return [Averages(decay=0.8)]


RUNS["averages"] = {"module": Averaged, "trainer": {"max_epochs": 2, "val_check_interval": 3}}


def test_an_average_takes_in_every_step(found: Found) -> None:
    assert [outcome.extra for outcome in found["averages"]] == [2 * EPOCH] * 2
