"""What cannot work says so, on every process, within seconds, with what to do instead."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError, ConfigurationError, CutError, PartitionError, ScheduleError
from lightning_pipe.parameters.deferred_batchnorm import check_norms
from lightning_pipe.trainer.checks import check_optimizers
from tests.support.lit_modules import Data, Lit
from tests.support.processes import refusals
from tests.support.trainer_runs import QUIET, quiet
from tests.support.user_modules import BuiltInSetup, Watching

SYNCHRONIZED = "with several processes: replicas share running statistics of plain batch norm"


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class FetchesItself(Lit):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        raise AssertionError("called")


class EvaluatesItself(Lit):
    def validation_step(self, dataloader_iter: Any) -> None:
        raise AssertionError("called")


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.embed, self.model)]


class Lbfgs(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class OwnScale(Lit):
    """Trains what a list hides from the module."""

    def configure_optimizers(self) -> Any:
        self.scales = [torch.nn.Parameter(torch.ones(1))]
        return torch.optim.SGD([*self.parameters(), *self.scales])


def fit(module: L.LightningModule, devices: int = 1, **strategy: Any) -> None:
    """Train for one epoch, without a look at losses."""
    quiet()
    calls = strategy.pop("callbacks", [])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PipeStrategy(compare_losses=False, **strategy),
        max_epochs=1,
        callbacks=calls,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module.double(), datamodule=Data())


def refused(feature: str) -> Any:
    """What a module does that a pipeline cannot."""
    return pytest.mark.feature(
        "Optimizers and schedulers", feature, "refused", "before the first batch, with what to do"
    )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(Manual, "automatic optimization with one optimizer", marks=refused("manual optimization")),
        pytest.param(
            FetchesItself, "training_step\\(batch, batch_idx\\)", marks=refused("training_step(dataloader_iter)")
        ),
        pytest.param(
            EvaluatesItself, "validation_step\\(batch, batch_idx\\)", marks=refused("validation_step(dataloader_iter)")
        ),
        pytest.param(Lbfgs, "treats every parameter by itself", marks=refused("LBFGS")),
        (OwnScale, r"a parameter that OwnScale\.parameters\(\) does not give"),
    ],
)
def test_modules_that_a_pipeline_cannot_train(module: type[Lit], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(module(), stages=2)


@pytest.mark.feature(
    "Optimizers and schedulers", "several optimizers", "refused", "by Lightning: they need manual optimization"
)
def test_several_optimizers() -> None:
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        fit(TwoOptimizers(), stages=2)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"schedule": "1f1c"}, ScheduleError, "Did you mean '1f1b'"),
        ({"reproducible_rng": True}, ConfigurationError, "'reproducible_rng' is gone: random numbers always depend on"),
        ({"whole_batches": True}, ConfigurationError, "every rank has whole batches now.\nHint: Leave it out"),
        ({"shard_optimizer": "all"}, ConfigurationError, "shard_optimizer='all' is not supported"),
        ({"reduce_dtype": "float16"}, ConfigurationError, "reduce_dtype='float16' is not supported"),
        ({"pipeline_parallel_size": 3}, ConfigurationError, "pipeline_parallel_size=1"),
        ({"stages": 9}, PartitionError, "5 layers for 9 stages"),
        ({"stages": 2, "layers": "modle"}, PartitionError, "Did you mean layers='model'"),
        ({"stages": 2, "balance": [2, 2]}, PartitionError, "2 \\+ 2 = 4"),
        ({"stages": 2, "split_batch": lambda batch, m: []}, ConfigurationError, "split_batch"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fit(Lit(), **options)


@pytest.mark.feature(
    "Optimizers and schedulers", "optimizers that clip by themselves", "refused", "names gradient_clip_val"
)
def test_optimizers_that_clip_by_themselves() -> None:
    module = Lit()
    clipping = torch.optim.SGD([{"params": [*module.parameters()], "max_grad_norm": 1.0}], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=1\.0"):
        check_optimizers([clipping], module, ranks=2)


def test_a_timeout_without_a_unit() -> None:
    seconds: Any = 60
    with pytest.raises(ConfigurationError, match=r"timeout=60 has no unit.*\n?.*timedelta\(seconds="):
        PipeStrategy(timeout=seconds)


def test_averaging_of_layers_that_come_late() -> None:
    with pytest.raises(ConfigurationError, match="Build the layers in __init__"):
        fit(BuiltInSetup(), stages=2, callbacks=[callbacks.EMAWeightAveraging()])


def test_processes_that_did_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"asks for 3 processes .* has 2"):
        fit(Lit(), devices=3)


# ------------------------------------------------------------------ errors while it runs


class Broken(Lit):
    """Fails in the second batch, in a way of one's choice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.how == "first" and self.global_rank == 1:
            raise ValueError("a bug on the first stage")
        if batch_idx == 1 and self.how == "none_early":
            return None
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.how == "last":
            raise ValueError("a bug on the last stage")
        if batch_idx == 1 and self.how == "twice":
            return loss + self(batch[0]).sum()
        return None if batch_idx == 1 and self.how == "none" else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "reads":
            print(self.model[0].weight.norm().item())
        if self.how == "runs":
            float(self.model[0](torch.ones(2, 16, dtype=torch.float64)).sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.how == "hook" and self.global_rank == 1:
            raise ValueError("a bug in a hook")


class Plateau(Lit):
    """Lowers its rate by losses of training, in every batch or epoch."""

    def __init__(self, interval: str, strict: bool = True) -> None:
        super().__init__()
        self.scheduling = {"interval": interval, "strict": strict, "monitor": f"loss_{interval}"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, threshold=1e3, threshold_mode="abs", patience=0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.scheduling}}

    def on_train_end(self) -> None:
        assert self.trainer.optimizers[0].param_groups[0]["lr"] < 0.1 or self.scheduling["interval"] == "epoch"


FAILURES: dict[str, tuple[int, type[BaseException], str]] = {
    "last": (0, ValueError, "a bug on the last stage"),
    "first": (1, ValueError, "a bug on the first stage"),
    "hook": (1, ValueError, "a bug in a hook"),
    "none": (0, ConfigurationError, "returned None"),
    "none_early": (1, CutError, "returned None before layer"),
    "reads": (0, RuntimeError, "Rank 0 does not hold 'model.0.weight': it is on rank 1"),
    "runs": (0, CutError, "Rank 0 does not hold 'model.0.weight', 'model.0.bias': they are on rank 1"),
    "twice": (0, CutError, "a second time"),
    "metrics": (-1, ConfigurationError, "Keep the metric in the LightningModule"),  # there: see `test_fit`
    "norms": (-1, ConfigurationError, "SyncBatchNorm waits for all processes"),
    "plateau": (-1, ConfigurationError, "ReduceLROnPlateau with interval='step' asks after each batch"),
    "plateau, not strict": (-1, ConfigurationError, "Use interval='epoch'"),
}
"""Where it fails first, or -1 for all processes at once, and what is said."""


def fail(process: int, how: str) -> None:
    """Train until it fails."""
    start = time.monotonic()
    try:
        if how == "norms":
            quiet()
            trainer = L.Trainer(accelerator="cpu", devices=2, strategy="pipe", sync_batchnorm=True, **QUIET)
            trainer.fit(Lit().double(), datamodule=Data())
        if how.startswith("plateau"):
            fit(Plateau("epoch"), devices=2, schedule="pipedream")  # the remedies
            fit(Plateau("step"), devices=2, micro_batches=2)
            fit(Plateau("step", strict=how == "plateau"), devices=2, schedule="pipedream")
        module = Watching() if how == "metrics" else Broken(how)
        fit(module, devices=2, micro_batches=2)
    finally:
        assert time.monotonic() - start < 30


@pytest.fixture(scope="module")
def failed() -> dict[str, list[BaseException | None]]:
    """What each process raises."""
    return refusals(fail, 2, FAILURES)


NORMS = [
    pytest.mark.feature("Trainer arguments", "sync_batchnorm", "refused", SYNCHRONIZED),
    pytest.mark.feature("Plugins", "TorchSyncBatchNorm", "refused", "as sync_batchnorm"),
    pytest.mark.feature("Plugins", "LayerSync", "refused", "as sync_batchnorm"),
]


@pytest.mark.parametrize("how", [pytest.param(how, marks=NORMS if how == "norms" else ()) for how in FAILURES])
def test_one_error_ends_all_processes(how: str, failed: dict[str, list[BaseException | None]]) -> None:
    process, kind, message = FAILURES[how]
    for number, error in enumerate(failed[how]):
        first = process in (number, -1)
        assert isinstance(error, kind if first else CommunicationError)
        assert message in "".join([str(error), *(getattr(error, "__notes__", []) if first else [])])


def test_synchronized_batch_norm_is_refused_in_modules_too() -> None:
    made_so = torch.nn.Sequential(torch.nn.SyncBatchNorm(4))
    check_norms(made_so, 1)
    with pytest.raises(ConfigurationError, match="Use plain batch norm"):
        check_norms(made_so, 2)


def test_a_step_that_fails_leaves_the_norms_of_the_module_as_they_were() -> None:
    class Fails(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model.append(torch.nn.BatchNorm1d(4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(KeyError):
        fit(module, stages=2, micro_batches=2)
    assert type(module.model[-1]) is torch.nn.BatchNorm1d
    assert int(module.model[-1].num_batches_tracked) == 1


def test_layers_that_change_themselves_before_they_are_called() -> None:
    class Normalised(Lit):
        def __init__(self) -> None:
            super().__init__()
            torch.nn.utils.spectral_norm(self.model[2])

    with pytest.raises(ConfigurationError, match=r"'model\.2' has torch\.nn\.utils\.spectral_norm"):
        fit(Normalised(), stages=2)
    fit(Normalised(), stages=1)


def test_layers_without_shapes_are_refused() -> None:
    class Lazy(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model.append(torch.nn.LazyBatchNorm1d())

    with pytest.raises(PartitionError, match=r"'model\.\d\.weight' has no shape yet"):
        fit(Lazy())


@torch.jit.script
def scripted_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_layers_are_refused_and_scripted_functions_are_not() -> None:
    class Scripted(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model[0] = torch.jit.script(self.model[0])

    class Function(Lit):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(scripted_tanh(x))

    with pytest.raises(PartitionError, match=r"(?s)'model\.0' is a module of TorchScript.*after fit"):
        fit(Scripted())
    module = Function()
    fit(module)
    torch.jit.script(module.model)
