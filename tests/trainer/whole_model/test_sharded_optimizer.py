"""``shard_optimizer`` under the Trainer: the same training, a part of state and gradients, ordinary checkpoints."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.zero import HolderGroup
from lightning_pipe.trainer.gradients import Gradients
from tests.support import oracle, processes
from tests.support.lit_modules import Data, Lit, dataset
from tests.support.pairs import asked, slow_but
from tests.support.trainer_runs import QUIET, quiet

CASES: dict[str, dict[str, Any]] = {
    "chimera": {"schedule": "chimera", "micro_batches": 4, "compare_losses": False},
    "replicas": {"schedule": "1f1b", "data_parallel_size": 2, "micro_batches": 1},
}


SHARDINGS: tuple[Sharding, ...] = (False, True, "gradients")


def fit(process: int, name: str, folder: str) -> dict[Sharding, list[int]]:
    """Train two epochs in two processes with and without sharding; what each then has of state and of gradients."""
    from lightning_pipe import PipeStrategy

    quiet()
    found = {}
    for sharded in SHARDINGS:
        L.seed_everything(7, verbose=False)
        module = Lit().double()
        module.counts = name != "chimera"
        strategy = PipeStrategy(**CASES[name], shard_optimizer=sharded)
        options = {**QUIET, "max_epochs": 2, "limit_val_batches": 0, "gradient_clip_val": 0.5}
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
        counts: list[int] = []

        class Count(L.Callback):
            def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
                absent = AbsentTensor
                gradients = [p.grad for p in pl_module.parameters() if not isinstance(p.grad, absent | None)]
                counts[:] = [sum(gradient.numel() for gradient in gradients)]  # noqa: B023

            def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                if trainer.current_epoch == 0:
                    trainer.save_checkpoint(Path(folder) / f"{name}-{sharded}-one-epoch.ckpt")  # noqa: B023

            def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                state = trainer.optimizers[0].state
                counts.append(sum(v.numel() for s in state.values() for v in s.values() if v.dim()))  # noqa: B023
                trainer.save_checkpoint(Path(folder) / f"{name}-{sharded}.ckpt")  # noqa: B023

        trainer.callbacks.append(Count())
        trainer.fit(module, datamodule=Data())
        found[sharded] = (oracle.Trace(weights=oracle.state_of(module)), counts)
    assert all(torch.equal(value, found[True][0].weights[key]) for key, value in found[False][0].weights.items())
    # a norm is a sum of other parts
    oracle.assert_equal(found["gradients"][0], found[False][0], 1e-12)
    return {sharded: counts for sharded, (_, counts) in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of every case."""
    return tmp_path_factory.mktemp("sharded")


def fit_and_resume(process: int, name: str, folder: str) -> tuple[dict[Sharding, list[int]], list[dict[str, Any]]]:
    return fit(process, name, folder), [go_on(name, folder, sharded) for sharded in SHARDINGS]


@pytest.fixture(scope="module", params=slow_but(CASES, "replicas"))
def trained(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Any, Any]:
    """A case, what every process holds of its state, and what it has after going on."""
    found = processes.run_trainers(fit_and_resume, 2, timeout=100, name=request.param, folder=str(folder))
    return request.param, *zip(*found, strict=True)


@pytest.mark.feature(
    "Optimizers and schedulers", "an optimizer divided over replicas and copies of stages (ZeRO stage 1)", "works"
)
@pytest.mark.timeout(120)
def test_training_and_checkpoint_are_those_without_sharding(trained: tuple[str, Any, Any], folder: Path) -> None:
    name, results, _ = trained
    (whole, states), *others = [result[False] for result in results]
    assert all(other == [whole, states] for other in others)
    for sharded in (True, "gradients"):
        parts = [result[sharded][1] for result in results]
        assert sum(parts) == states
        assert max(parts) < states
    gradients = [result["gradients"][0] for result in results]
    assert sum(gradients) == whole
    assert max(gradients) < whole
    one, *others = (torch.load(folder / f"{name}-{kind}.ckpt", weights_only=False) for kind in SHARDINGS)
    for other, close in zip(others, (torch.equal, partial(torch.allclose, rtol=1e-12, atol=1e-12)), strict=True):
        for key, value in one["state_dict"].items():
            assert close(value, other["state_dict"][key]), key
        found = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (one, other)]
        assert found[0].keys() == found[1].keys()
        for index, state in found[0].items():
            for key, value in state.items():
                assert close(value, found[1][index][key]), (index, key)


class Averaging(torch.optim.SGD):
    """Keeps an average of each parameter, whether it has a gradient or not, and a number for all of them."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            average = self.state[parameter].setdefault("average", parameter.detach().clone())
            average.lerp_(parameter.detach(), 0.5)
        return loss


class Averaged(Lit):
    """Trains with an optimizer, and then with another one."""

    counts = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Averaging(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.optimizers = [Averaging(self.parameters(), lr=0.05, momentum=0.5)]


def fit_and_save(process: int, folder: Path, devices: int = 2) -> dict[str, list[Path]]:
    """By strategy the files that a run writes at its end, and behind it."""
    from lightning_pipe import PipeStrategy

    quiet()
    stages = {"stages": PipeStrategy(micro_batches=4)}
    replicas = {str(kind): PipeStrategy(**CASES["replicas"], shard_optimizer=kind) for kind in SHARDINGS}
    strategies: dict[str, Any] = stages | replicas if devices > 1 else {"plain": "auto"}
    written = {}
    for name, strategy in strategies.items():
        paths = written[name] = [folder / f"{name}-{when}.ckpt" for when in ("end", "after")]
        saving = L.pytorch.callbacks.LambdaCallback(on_train_end=lambda t, _: t.save_checkpoint(paths[0]))  # noqa: B023
        L.seed_everything(7, verbose=False)
        trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **QUIET)
        trainer.callbacks.append(saving)
        trainer.fit(Averaged().double(), datamodule=Data())
        trainer.save_checkpoint(paths[1])
    return written


@pytest.mark.timeout(60)
def test_the_whole_state_is_written_at_the_end_of_a_run_and_behind_it(tmp_path: Path) -> None:
    written = {**fit_and_save(0, tmp_path, 1), **processes.run_trainers(fit_and_save, 2, folder=tmp_path)[0]}
    for name, paths in written.items():
        expected = torch.load(written["plain" if name == "stages" else "False"][0])
        states = expected["optimizer_states"][0]["state"].values()
        assert sum(map(len, states)) == 2 * len(list(Averaged().parameters())) + 1
        for path in paths if name != "plain" else ():
            found = torch.load(path)
            values = [
                {
                    f"{index} {key}": each[key]
                    for index, each in file["optimizer_states"][0]["state"].items()
                    for key in each
                }
                | file["state_dict"]
                for file in (found, expected)
            ]
            oracle.assert_equal(*(oracle.Trace(weights=each) for each in values))


def go_on(name: str, folder: str, sharded: Sharding) -> dict[str, Any]:
    """Go on for an epoch with another schedule, from the file that ``name`` has left."""
    from lightning_pipe import PipeStrategy

    quiet()
    other = next(case for case in CASES if case != name)
    L.seed_everything(7, verbose=False)
    module = Lit().double()
    module.counts = False
    strategy = PipeStrategy(**CASES[other], shard_optimizer=sharded)
    # two pipelines need half as many steps as one, and the scheduler has so many
    options = {**QUIET, "max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 0, "gradient_clip_val": 0.5}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
    written: Sharding = "gradients" if sharded is True else True
    path = Path(folder) / f"{name}-{written}-one-epoch.ckpt"
    trainer.fit(module, datamodule=Data(), ckpt_path=path, weights_only=False)
    return oracle.state_of(module)


@pytest.mark.feature("Checkpoints", "a divided optimizer's state", "works", "goes on as an undivided one")
@pytest.mark.timeout(120)
def test_another_layout_goes_on_from_the_file(trained: tuple[str, Any, Any], folder: Path) -> None:
    name, _, resumed = trained
    plain, *others = (
        [oracle.Trace(weights=weights) for weights in of_ranks] for of_ranks in zip(*resumed, strict=True)
    )
    before = torch.load(folder / f"{name}-True-one-epoch.ckpt", weights_only=False)["state_dict"]
    for sharded in others:
        for of_rank in sharded:
            oracle.assert_equal(of_rank, plain[0], 1e-12)
    weights = plain[0].weights
    assert any(not torch.equal(value, before[key]) for key, value in weights.items() if key in before)


# ------------------------------------------------------------------ gradients on one of four holders


class Tied(Lit):
    """Layers of two stages have a weight in common; one gradient is too large for 16 bits in the second step."""

    def __init__(self, overflow: bool = False) -> None:
        super().__init__()
        self.model[2].weight = self.model[0].weight
        self.hooked = overflow

    def on_train_start(self) -> None:
        if self.hooked:
            bias = self.model[0].bias
            bias.register_hook(lambda gradient: gradient * (math.inf if self.trainer.global_step == 2 else 1.0))


class Noise(L.Callback):
    """Changes gradients in place, as for privacy, and asks for one."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        generator = torch.Generator().manual_seed(trainer.global_step)
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=1e-3)
        try:
            assert pl_module.model[3].weight.grad is not None
            float(pl_module.model[3].weight.grad.sum())
        except CutError as error:
            self.refused.add(str(error))


class SpoiltReplica(L.Callback):
    """One gradient is too large for 16 bits in the second step, on one replica alone: its own code has made it so."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pipeline = trainer.strategy.pipeline
        if trainer.global_step == 2 and pipeline.transport.replica == 1 and pipeline.holds("model.3.weight"):
            pl_module.model[3].weight.grad.fill_(math.inf)


class Ordered(Data):
    """Batches in a fixed order, the same for all replicas."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def train_dataloader(self) -> DataLoader:
        x, y = dataset(24).tensors
        return DataLoader(TensorDataset(x.to(self.dtype), y), batch_size=8)


STAGES = {"micro_batches": 2, "balance": [2, 3], "data_parallel_size": 2, "compare_losses": False}
DIVIDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": (STAGES, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "chimera": ({**STAGES, "schedule": "chimera"}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    "scaled": (STAGES, {"gradient_clip_val": 0.5}),
}


def train(
    process: int, name: str, devices: int, sharded: Sharding = False, spoilt: bool = False
) -> tuple[oracle.Trace, set[str]]:
    """The weights and the scale at the end, and what was refused; ``spoilt``: by one replica's callback."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    options, of_trainer = DIVIDED[name]
    scaled, noise = name == "scaled", Noise()
    dtype = torch.float32 if scaled else torch.float64
    module = Tied(overflow=scaled and not spoilt).to(dtype)
    module.counts = name != "chimera"
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10))] if scaled else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        # ranks that wait for each other are to fail before the test's own time is over
        strategy=PipeStrategy(**options, shard_optimizer=sharded, timeout=timedelta(seconds=30))
        if devices > 1
        else "auto",
        max_epochs=1,
        use_distributed_sampler=False,
        limit_val_batches=0,
        plugins=plugins,
        callbacks=[SpoiltReplica()] if spoilt else [] if scaled else [noise],
        **of_trainer,
        **QUIET,
    )
    trainer.fit(module, datamodule=Ordered(dtype))
    trace = oracle.Trace(weights=oracle.state_of(module))
    if scaled:
        trace.metrics["scale"] = float(plugins[0].scaler.get_scale())
    return trace, noise.refused


class InSixteenBits(L.Callback):
    """For every gradient that this process gets whether it has the digits of bfloat16 alone."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        own = [value.grad for value in pl_module.parameters() if not isinstance(value.grad, AbsentTensor | None)]
        self.found += [torch.equal(gradient, gradient.bfloat16().double()) for gradient in own]


def rounded(process: int, sharded: Sharding, devices: int = 4) -> tuple[oracle.Trace, list[bool]]:
    """Train with sums in a narrow type, or on one device: the weights, and whether each sum has its digits alone."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module, digits = Lit().double(), InSixteenBits()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PipeStrategy(**STAGES, shard_optimizer=sharded, reduce_dtype="bfloat16") if devices > 1 else "auto",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[digits],
        **QUIET,
    )
    trainer.fit(module, datamodule=Data(16))
    return oracle.Trace(weights=oracle.state_of(module)), digits.found


RUNS: dict[str, Any] = {
    **{name: partial(train, name=name, devices=4, sharded="gradients") for name in DIVIDED},
    "whole": partial(train, name="scaled", devices=4),
    "one replica": partial(train, name="scaled", devices=4, spoilt=True),
    "one replica, divided": partial(train, name="scaled", devices=4, sharded=True, spoilt=True),
    "rounded": partial(rounded, sharded=False),
    "rounded, divided": partial(rounded, sharded="gradients"),
}
Four = dict[str, list[Any]]


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> Four:
    """What two ranks and two replicas have."""
    slow = {"chimera", "one replica"}.difference(asked(request, "name"), asked(request, "who"))
    return processes.in_turn({name: run for name, run in RUNS.items() if name not in slow}, 4)


@pytest.mark.feature(
    "Optimizers and schedulers",
    'gradients divided over their holders (shard_optimizer="gradients", ZeRO stage 2)',
    "works",
    "as on one device; a hook reads a gradient where its sum is",
)
@pytest.mark.parametrize("name", slow_but(["1f1b", "chimera"], "1f1b"))
@pytest.mark.timeout(120)
def test_divided_gradients_train_as_one_device(name: str, four: Four) -> None:
    """With tied weights, gradients of several batches, limits of both kinds, and a callback that changes gradients."""
    truth, refused = train(0, name, 1)
    assert not refused
    for found, _ in four[name]:
        truth.weights["steps"] = found.weights["steps"]  # counts micro-batches
        oracle.assert_equal(found, truth)


def test_a_gradient_that_another_rank_has_says_so(four: Four) -> None:
    refused = [texts for _, texts in four["1f1b"]]
    # the layer norm is one of the second stage, which two processes hold; one of them has its gradient
    assert sum(not texts for texts in refused) == 1
    messages = [text for texts in refused for text in texts if "gets the summed gradient of 'model.3.weight'" in text]
    assert len(messages) == 1
    assert "reductions.shards.mine(parameter)" in messages[0]


@pytest.mark.parametrize(
    "who", slow_but(["scaled", "one replica", "one replica, divided"], "scaled", "one replica, divided")
)
def test_all_pass_by_a_step_that_one_has_found_too_large(who: str, four: Four) -> None:
    """Holders of a stage, and replicas: whether each has all gradients, or updates a share that others do not take."""
    for (found, _), (whole, _) in zip(four[who], four["whole"], strict=True):
        oracle.assert_equal(found, whole, 1e-6)
        assert found.metrics["scale"] == 2.0**9


def test_divided_updates_of_rounded_sums_are_the_undivided_ones(four: Four) -> None:
    """The sum of two does not depend on their order, so a divided run rounds as the undivided one does."""
    _, digits = rounded(0, sharded=False, devices=1)
    assert not any(digits)
    for (whole, all_digits), (found, own) in zip(four["rounded"], four["rounded, divided"], strict=True):
        assert all(all_digits)
        oracle.assert_equal(found, whole, 0.0)
        assert own
        assert all(own)
        assert len(own) < len(all_digits)


def test_hooks_that_some_holders_would_not_hear_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    own: Any = SimpleNamespace(trainer=SimpleNamespace(precision_plugin=SimpleNamespace(_after_closure=None)))
    shards = SimpleNamespace(groups=[HolderGroup((0, 1), (parameter,))], drop_states=lambda optimizers: None)
    pipeline: Any = SimpleNamespace(
        module=own,
        reductions=SimpleNamespace(scattered=True, shards=shards),
        ownership=SimpleNamespace(name_of=lambda tensor: "weight", users_known=False),
    )
    gradients = Gradients(pipeline, divides=True)
    gradients._divide([])
    gradients.after_batch([])
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ConfigurationError, match=r"the gradient of 'weight'(.|\n)*shard_optimizer=True"):
        gradients.after_batch([])
    pipeline.reductions.scattered = False
    gradients.after_batch([])
    gradients.end()
