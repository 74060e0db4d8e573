"""Cases of Lightning's features that no other test has: each does something and returns what it has seen."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks, loggers, profilers
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.tuner import Tuner
from torch import nn

from tests.support.lit_modules import CLASSES, Data, Lit
from tests.support.trainer_runs import QUIET, ROWS, quiet


class Runner:
    """Makes Trainers on one plain device, or on a pipeline.

    Args:
        devices: processes; ``None``: one plain device.
        folder: for files.
    """

    def __init__(self, devices: int | None, folder: Path) -> None:
        self.devices, self.folder = devices, folder

    def trainer(self, **options: Any) -> L.Trainer:
        """A quiet Trainer of one epoch."""
        from lightning_pipe import PipeStrategy

        quiet()
        L.seed_everything(7, verbose=False)
        strategy = PipeStrategy(micro_batches=1) if self.devices else "auto"
        options = {"max_epochs": 1, "num_sanity_val_steps": 0, "default_root_dir": self.folder, **QUIET, **options}
        return L.Trainer(accelerator="cpu", devices=self.devices or 1, strategy=strategy, **options)

    def fit(self, module: L.LightningModule | None = None, **options: Any) -> L.Trainer:
        """Train; the weights of all parts are those of the whole module afterwards."""
        trainer = self.trainer(**options)
        trainer.fit((Lit() if module is None else module).double(), datamodule=Data(ROWS))
        return trainer


Look = tuple[dict[str, Any], Callable[[], Any]]
"""Arguments of the Trainer, and what has been seen when the run is over."""


def weights(trainer: L.Trainer) -> dict[str, list[float]]:
    """The trained parameters."""
    return {name: value.flatten().tolist() for name, value in trainer.lightning_module.named_parameters()}


# ------------------------------------------------------------------ Trainer flags


def flags(**options: Any) -> Callable[[Runner], Any]:
    """Trains with some arguments of the Trainer; looks at weights, counts and logged values."""

    def case(runner: Runner) -> Any:
        trainer = runner.fit(**options)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return trainer.global_step, trainer.current_epoch, values, weights(trainer)

    return case


def backends(**options: Any) -> Callable[[Runner], Any]:
    """What the Trainer has set of torch, as training sees it, and what it trains."""

    def case(runner: Runner) -> Any:
        seen: list[Any] = []

        class Looks(L.Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))

        before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        try:
            trainer = runner.fit(callbacks=[Looks()], **options)
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.backends.cudnn.benchmark = before[1]
        return seen, weights(trainer)

    return case


class Inferring(Lit):
    """Says in which mode it is tested."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("inference", float(torch.is_inference_mode_enabled()))


def limited_evaluations(runner: Runner) -> Any:
    """How many batches of each kind there are, without inference mode."""
    trainer = runner.trainer(limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1, inference_mode=False)
    module = Inferring().double()
    found = [trainer.validate(module, datamodule=Data(ROWS), verbose=False)]
    found.append(trainer.test(module, datamodule=Data(ROWS), verbose=False))
    return found, [each.tolist() for each in trainer.predict(module, datamodule=Data(ROWS))]


def root_folder(runner: Runner) -> Any:
    """Where checkpoints are written if nothing else is said."""
    runner.fit(enable_checkpointing=True, default_root_dir=runner.folder / "root")
    return sorted(path.name for path in (runner.folder / "root").rglob("*.ckpt"))


def weights_alone(runner: Runner) -> Look:
    """What is in a file of a `ModelCheckpoint` that keeps weights alone, on the process that has written it."""
    saving = callbacks.ModelCheckpoint(runner.folder / "weights", save_weights_only=True)

    def seen() -> Any:
        if not saving.best_model_path:
            return {}
        content = torch.load(saving.best_model_path, weights_only=False)
        keys = sorted(key for key in content if not key.startswith("lightning_pipe"))
        values = {name: value.tolist() for name, value in content["state_dict"].items() if name.endswith("weight")}
        return keys, values

    return {"callbacks": [saving], "enable_checkpointing": True}, seen


# ------------------------------------------------------------------ callbacks


def called(runner: Runner) -> Any:
    """How often the functions of a `LambdaCallback` are called."""
    counts = {"on_train_batch_end": 0, "on_validation_end": 0, "on_fit_end": 0}

    def count(name: str) -> Callable[..., None]:
        def function(*_: Any) -> None:
            counts[name] += 1

        return function

    runner.fit(callbacks=[callbacks.LambdaCallback(**{name: count(name) for name in counts})])
    return counts


def rates(runner: Runner) -> Look:
    """What a `LearningRateMonitor` has seen."""
    monitor = callbacks.LearningRateMonitor(logging_interval="step")
    return {"callbacks": [monitor], "logger": loggers.CSVLogger(runner.folder)}, lambda: monitor.lrs


def timed(runner: Runner) -> Any:
    """A `Timer` that ends the training, and whether it has measured time."""
    timer = callbacks.Timer("00:00:00:00", interval="step")
    trainer = runner.fit(callbacks=[timer], max_epochs=3)
    return trainer.global_step, timer.time_elapsed("train") > 0


def throughput(runner: Runner) -> Look:
    """What a `ThroughputMonitor` counts."""
    monitor = callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)

    def seen() -> Any:
        return {name: value for name, value in logged(runner).items() if name.endswith(("samples", "batches"))}

    return {"callbacks": [monitor], "logger": loggers.CSVLogger(runner.folder)}, seen


def accumulation(runner: Runner) -> Any:
    """The weights with a `GradientAccumulationScheduler`."""
    scheduler = callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = runner.fit(callbacks=[scheduler], max_epochs=2)
    return trainer.global_step, weights(trainer)


class WithBackbone(Lit):
    """Its embedding is what `BackboneFinetuning` knows as the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.embed

    def configure_optimizers(self) -> Any:
        trained = [value for name, value in self.named_parameters() if not name.startswith(("embed", "backbone"))]
        return torch.optim.SGD(trained, lr=0.1)


def backbone(runner: Runner) -> Any:
    """The weights with a `BackboneFinetuning`."""
    tuning = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    return weights(runner.fit(WithBackbone(), callbacks=[tuning], max_epochs=2))


def summary(kind: type[Any]) -> Callable[[Runner], Look]:
    """What a summary shows, and the shape of the input that it shows sizes of, in a hook after batches."""

    def look(runner: Runner) -> Look:
        seen: list[Any] = []

        class Kept(kind):  # type: ignore[misc]
            @staticmethod
            def summarize(summary_data: Any, *counts: Any, **further: Any) -> None:
                seen.append((str(summary_data), counts[:2], further.get("total_flops")))

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                seen.append(tuple(pl_module.example_input_array.shape))

        return {"callbacks": [Kept(max_depth=2)], "enable_model_summary": True}, lambda: seen

    return look


def progress(kind: type[Any]) -> Callable[[Runner], Look]:
    """What a progress bar shows at the end of an epoch."""

    def look(runner: Runner) -> Look:
        seen: list[Any] = []

        class Kept(kind):  # type: ignore[misc]
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                super().on_train_epoch_end(trainer, pl_module)
                shown = {k: float(v) for k, v in self.get_metrics(trainer, pl_module).items() if k != "v_num"}
                seen.append((self.total_train_batches, shown))

        return {"callbacks": [Kept()], "enable_progress_bar": True}, lambda: seen

    return look


class OwnBar(callbacks.ProgressBar):
    """A progress bar of one's own, as Lightning's documentation has it: it can do no more than it must."""

    def enable(self) -> None:
        """As the base class asks."""

    def disable(self) -> None:
        """As the base class asks."""


def spikes(runner: Runner) -> Look:
    """What a `SpikeDetection` compares: every batch's loss."""
    losses: list[float] = []

    class Kept(callbacks.SpikeDetection):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    skipped = str(runner.folder / "skipped.json")
    return {"callbacks": [Kept(rtol=100.0, exclude_batches_path=skipped)]}, lambda: losses


def found_rate(runner: Runner) -> Any:
    """What the Tuner and `LearningRateFinder` find."""
    trainer = runner.trainer(max_epochs=2)
    module = Lit().double()
    finder = Tuner(trainer).lr_find(module, datamodule=Data(ROWS), num_training=6, early_stop_threshold=None)
    assert finder is not None
    return finder.results


def rate_callback(runner: Runner) -> Any:
    """The rate that `LearningRateFinder` sets, and the training after it."""
    finder = callbacks.LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    trainer = runner.fit(callbacks=[finder], max_epochs=2)
    return finder.optimal_lr.results if finder.optimal_lr else None, weights(trainer)


# ------------------------------------------------------------------ profilers and loggers


def profiled(kind: type[Any]) -> Callable[[Runner], Look]:
    """The names of what a profiler has seen, and how often it saw a batch."""

    def look(runner: Runner) -> Look:
        seen: list[str] = []

        class Kept(kind):  # type: ignore[misc]
            def start(self, action_name: str) -> None:
                seen.append(action_name)
                super().start(action_name)

        names = ("run_training_batch", "run_training_epoch")
        return {"profiler": Kept()}, lambda: {name: seen.count(name) for name in names}

    return look


class Blocks(Lit):
    """Layers that have parts."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        self.model = nn.Sequential(*blocks, nn.Linear(16, CLASSES))


def profiled_parts(runner: Runner) -> Any:
    """What training and validation are with a profiler that would name the parts of layers, by hooks on them."""
    options, seen = profiled(profilers.PyTorchProfiler)(runner)
    trainer = runner.fit(Blocks(), **options)
    return seen(), trainer.validate(trainer.lightning_module, datamodule=Data(ROWS), verbose=False), weights(trainer)


def logged(runner: Runner) -> dict[str, list[str]]:
    """The columns of the CSV file that a run has written, without what is left empty; empty on other processes."""
    files = sorted(runner.folder.rglob("metrics.csv"))
    if not files:
        return {}
    with open(files[-1]) as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows if row[name]] for name in rows[0]}


def csv_file(runner: Runner) -> Look:
    """The file of a `CSVLogger`, without what takes time, and its hyperparameters."""

    def seen() -> Any:
        columns = {name: values for name, values in logged(runner).items() if "/" not in name}
        table = {name: [float(value) for value in values] for name, values in columns.items()}
        return table, [path.read_text() for path in runner.folder.rglob("hparams.yaml")]

    return {"logger": loggers.CSVLogger(runner.folder)}, seen


class OwnLogger(Logger):
    """Keeps what it is asked to log, as every logger's experiment does: on process 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Any]:
        """Where values go."""
        return self.kept

    @property
    def name(self) -> str:
        """Of the experiment."""
        return "own"

    @property
    def version(self) -> int:
        """Of the experiment."""
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep values."""
        self.experiment.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Keep hyperparameters."""
        self.experiment.append(dict(params))


def own_logger(**options: Any) -> Callable[[Runner], Any]:
    """What a logger of one's own is asked to log."""

    def case(runner: Runner) -> Any:
        logger = OwnLogger()
        runner.fit(logger=logger, **options)
        return logger.kept

    return case


# ------------------------------------------------------------------ the cases


def together(runner: Runner, looks: Mapping[str, Callable[[Runner], Look]]) -> dict[str, Any]:
    """What several looks see of one run, by their names; of two that need a logger, one has it."""
    options: dict[str, Any] = {"callbacks": []}
    seen = {}
    for name, look in looks.items():
        own, seen[name] = look(runner)
        options = {**own, **options, "callbacks": [*options["callbacks"], *own.get("callbacks", ())]}
    runner.fit(**options)
    return {name: each() for name, each in seen.items()}


def alone(look: Callable[[Runner], Look]) -> Callable[[Runner], Any]:
    """A run for one look."""
    return lambda runner: together(runner, {"look": look})["look"]


LOOKS: dict[str, Callable[[Runner], Look]] = {
    "save_weights_only": weights_alone,
    "LearningRateMonitor": rates,
    "ThroughputMonitor": throughput,
    "ModelSummary": summary(callbacks.ModelSummary),
    "TQDMProgressBar": progress(callbacks.TQDMProgressBar),
    "SpikeDetection": spikes,
    "SimpleProfiler": profiled(profilers.SimpleProfiler),
    "CSVLogger": csv_file,
}
"""By the name of the feature: those that look at the same run."""
CASES: dict[str, Callable[[Runner], Any]] = {
    "max_steps": flags(max_steps=4, max_epochs=-1),
    "max_time": flags(max_time="00:00:00:00"),
    "min_steps": flags(min_steps=4, max_time="00:00:00:00"),
    "min_epochs": flags(min_epochs=2, max_epochs=3, max_time="00:00:00:00"),
    "check_val_every_n_epoch": flags(check_val_every_n_epoch=2, max_epochs=3),
    "deterministic": backends(deterministic=True, benchmark=True),
    "barebones": flags(barebones=True, log_every_n_steps=0),
    "limits": limited_evaluations,
    "default_root_dir": root_folder,
    "LambdaCallback": called,
    "Timer": timed,
    "GradientAccumulationScheduler": accumulation,
    "BackboneFinetuning": backbone,
    "RichModelSummary": alone(summary(callbacks.RichModelSummary)),
    "ProgressBar": alone(progress(OwnBar)),
    "RichProgressBar": alone(progress(callbacks.RichProgressBar)),
    "LearningRateFinder": rate_callback,
    "Tuner": found_rate,
    "AdvancedProfiler": alone(profiled(profilers.AdvancedProfiler)),
    "PyTorchProfiler": profiled_parts,
    "PassThroughProfiler": alone(profiled(profilers.PassThroughProfiler)),
    "Logger": own_logger(log_every_n_steps=2, enable_autolog_hparams=False),
}
"""By the name of the feature: those that have a run to themselves."""
