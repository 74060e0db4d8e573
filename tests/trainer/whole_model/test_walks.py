"""Hooks that walk over the parameters, buffers and gradients of all layers give what one device gives, or an error."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipe.errors import PipeError
from tests.support import oracle
from tests.support.lit_modules import FEATURES, Data
from tests.support.processes import outcomes, run_trainers
from tests.support.trainer_runs import QUIET, quiet

DECAY = 0.9


class Walks(L.LightningModule):
    """A network with batch norm in its layers, without hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 8)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(self.embed(batch[0].flatten(1))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ------------------------------------------------------------------ averages


class Averaged(Walks):
    """torch's averaged weights as an attribute, made before there are ranks."""

    options: ClassVar[dict[str, Any]] = {"use_buffers": True}

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, **self.options)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.model)


class AveragedByLists(Averaged):
    """... by functions of lists."""

    options: ClassVar[dict[str, Any]] = {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}


class AveragedByFunction(Averaged):
    """... by a function of tensors."""

    options: ClassVar[dict[str, Any]] = {"avg_fn": lambda average, weight, _: DECAY * average + (1 - DECAY) * weight}


class AveragedWhole(Walks):
    """The average of the whole module, in a list, so that it is no part of the module."""

    def on_fit_start(self) -> None:
        self.hidden = [AveragedModel(self)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.hidden[0].update_parameters(self)

    def on_train_end(self) -> None:
        for weight, average in zip(self.parameters(), self.hidden[0].parameters(), strict=True):
            weight.data.copy_(average.data)
        del self.hidden


class Teacher(Walks):
    """A copy of the layers that follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        yield from zip(self.teacher.parameters(), self.model.parameters(), strict=True)
        yield from zip(self.teacher.buffers(), self.model.buffers(), strict=True)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for teacher, student in self.pairs():
                self.follow(teacher, student)

    def follow(self, teacher: Tensor, student: Tensor) -> None:
        if teacher.is_floating_point():
            teacher.data.mul_(DECAY).add_(student.data, alpha=1 - DECAY)


class TeacherByData(Teacher):
    def follow(self, teacher: Tensor, student: Tensor) -> None:
        if teacher.is_floating_point():
            teacher.data = DECAY * teacher.data + (1 - DECAY) * student.data


class TeacherByLerp(Teacher):
    def follow(self, teacher: Tensor, student: Tensor) -> None:
        if teacher.is_floating_point():
            teacher.copy_(torch.lerp(teacher, student, 1 - DECAY))


class TeacherByState(Teacher):
    """Follows by loading a state."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.load_state_dict(copy.deepcopy(self.model.state_dict()))


class Shadows(Walks):
    """Averages as buffers with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        for name, weight in self.model.named_parameters():
            self.register_buffer("shadow_" + name.replace(".", "_"), weight.clone().detach())

    def on_train_batch_end(self, *_: Any) -> None:
        for name, weight in self.model.named_parameters():
            shadow = getattr(self, "shadow_" + name.replace(".", "_"))
            shadow.sub_((1 - DECAY) * (shadow - weight.detach()))


class ShadowsAnew(Shadows):
    """... that are assigned anew."""

    def on_train_batch_end(self, *_: Any) -> None:
        for name, weight in self.model.named_parameters():
            key = "shadow_" + name.replace(".", "_")
            setattr(self, key, DECAY * getattr(self, key) + (1 - DECAY) * weight.detach())


class Dictionary(Walks):
    """Averages in a dictionary, which goes into the checkpoint and in the end into the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, weight in self.named_parameters():
            self.averages[name].mul_(DECAY).add_(weight.detach(), alpha=1 - DECAY)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = self.averages

    def on_train_end(self) -> None:
        for name, weight in self.named_parameters():
            weight.data.copy_(self.averages[name])


class ListAverage(Walks):
    """Averages in a list, as torch_ema keeps them; swapped in for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows = [weight.detach().clone() for weight in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        kept = [weight.data.clone() for weight in self.parameters()]
        with torch.no_grad():
            for shadow, weight in zip(self.shadows, self.parameters(), strict=True):
                difference = shadow - weight
                difference.mul_(1 - DECAY)
                shadow.sub_(difference)
                weight.data.copy_(shadow.data)
            for before, weight in zip(kept, self.parameters(), strict=True):
                weight.data.copy_(0.5 * weight.data + 0.5 * before)


class Lists(Walks):
    """Averages by functions of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows = [weight.detach().clone() for weight in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        weights = [weight.detach() for weight in self.parameters()]
        torch._foreach_mul_(self.shadows, DECAY)
        torch._foreach_add_(self.shadows, weights, alpha=1 - DECAY)
        differences = torch._foreach_sub(weights, self.shadows)
        torch._foreach_add_(weights, differences, alpha=-0.1)


class KeepsBest(Walks):
    """Keeps a state by hand and goes back to it; keeps a copy of the layers as a module that was not there before."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.best = {name: value.cpu().clone() for name, value in self.state_dict().items()}
            self.copy = copy.deepcopy(self.model)
            self.mean = 0.5 * self.model[0].weight.detach() + 0.5 * self.copy[3].weight.detach()
            del self.mean
        else:
            self.load_state_dict({**self.state_dict(), **self.best})


class Swaps(Teacher):
    """Swaps the layers' weights with averages and back."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        for _ in range(2):
            for teacher, student in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                kept = torch.empty(student.shape, dtype=student.dtype)
                kept.copy_(student.data)
                student.data.copy_(teacher.data)
                teacher.data.copy_(kept)


# ------------------------------------------------------------------ changes


class Perturbed(Walks):
    """Adds noise to all weights, and limits them."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(0.01 * torch.randn_like(weight)).clamp_(-0.5, 0.5)
                weight.data = weight.data - 0.01 * torch.randn(weight.shape, dtype=weight.dtype)


class Clips(torch.optim.SGD):
    """Limits the norm of all gradients by itself."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        nn.utils.clip_grad_norm_([weight for group in self.param_groups for weight in group["params"]], 0.1)
        super().step()
        return loss


class Clipped(Walks):
    def configure_optimizers(self) -> Any:
        return Clips(self.parameters(), lr=0.1)


class NoisyGradients(Walks):
    """Adds noise to gradients, and to those that a layer has; limits them."""

    def on_after_backward(self) -> None:
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad += 0.1 * torch.randn_like(weight.grad)
                weight.grad.data.clamp_(-1.0, 1.0)
        self.model[0].weight.grad.add_(0.1 * torch.randn(8, 8, dtype=torch.float64))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = weight.grad + 0.01 * torch.rand(weight.grad.shape, dtype=weight.dtype)
        nn.utils.clip_grad_value_(self.parameters(), 0.5)
        torch._foreach_mul_([weight.grad for weight in self.parameters()], 0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        assert all(weight.grad is not None for weight in self.parameters())
        self.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class PartlyTrained(NoisyGradients):
    """Some weights are frozen until the second epoch."""

    def on_train_epoch_start(self) -> None:
        self.model[0].requires_grad_(self.current_epoch == 1)

    def on_after_backward(self) -> None:
        assert (self.model[0].weight.grad is not None) == (self.current_epoch == 1)
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad += 0.1 * torch.randn_like(weight.grad)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


CASES: dict[str, type[Walks]] = {
    kind.__name__: kind
    for kind in (
        *(Averaged, AveragedByLists, AveragedByFunction, AveragedWhole),
        *(Teacher, TeacherByData, TeacherByLerp, TeacherByState, Shadows, ShadowsAnew, Dictionary, ListAverage),
        *(Lists, KeepsBest, Swaps, Perturbed, Clipped, NoisyGradients, PartlyTrained),
    )
}


def fit(kind: type[Walks], devices: int | None, folder: Path, **strategy: Any) -> dict[str, Any]:
    """Train for two epochs; returns the checkpoint of the end, with the weights that the module has afterwards."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module = kind().double()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(**{"micro_batches": 1, "layers": "model", **strategy}) if devices else "auto",
        max_epochs=2,
        callbacks=[Saves(folder / f"{kind.__name__}-{devices}.ckpt")],
        **QUIET,
    )
    trainer.fit(module, Data().train_dataloader())
    checkpoint = torch.load(folder / f"{kind.__name__}-{devices}.ckpt", weights_only=False)
    return {"state": oracle.state_of(module), "saved": checkpoint["state_dict"], "averages": checkpoint.get("averages")}


class Saves(L.Callback):
    """Saves a checkpoint before the second epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 3:
            trainer.save_checkpoint(self.path)


def fits(process: int, names: list[str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = fit(CASES[name], 2, folder)
        except BaseException as error:
            found[name] = {"error": "".join(traceback.format_exception(error))}
            break
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walks")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return run_trainers(fits, 2, timeout=110, names=list(CASES), folder=folder)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, found: list[dict[str, Any]], folder: Path) -> None:
    plain = fit(CASES[name], None, folder)
    for of_process in found:
        if name not in of_process:
            pytest.skip("an earlier case failed")
        assert "error" not in of_process[name], of_process[name]["error"]
        for key, expected in plain.items():
            if expected is not None:
                trace = oracle.Trace(weights=of_process[name][key])
                oracle.assert_equal(trace, oracle.Trace(weights=dict(expected)))


# ------------------------------------------------------------------ what only one device can do


class Joins(Walks):
    """An optimizer that has a rate for all weights."""

    class Normalised(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            gradients = [
                weight.grad for group in self.param_groups for weight in group["params"] if weight.grad is not None
            ]
            for gradient in gradients:
                gradient.div_(torch.stack([each.norm() for each in gradients]).norm())
            super().step()
            return loss

    def configure_optimizers(self) -> Any:
        return self.Normalised(self.parameters(), lr=0.1)


class Distils(Teacher):
    """The teacher teaches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0].flatten(1))
        return F.mse_loss(self.model(x), self.teacher(x))


class SumsNorms(Walks):
    """Logs a sum over the gradients that a loop sees."""

    def on_after_backward(self) -> None:
        total = 0.0
        for weight in self.parameters():
            if weight.grad is not None:
                total += weight.grad.data.norm().item() ** 2
        self.log("norm", total**0.5)


class Histograms(Walks):
    """Shows a weight to a logger, which reads it as an array."""

    def on_train_batch_end(self, *_: Any) -> None:
        for weight in self.parameters():
            weight.detach().cpu().numpy()


class Unnamed(ListAverage):
    """Saves averages without their names, made by assigning data."""

    def on_train_batch_end(self, *_: Any) -> None:
        for shadow, weight in zip(self.shadows, self.parameters(), strict=True):
            shadow.data = DECAY * shadow.data + (1 - DECAY) * weight.data

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = self.shadows


class Mixed(Walks):
    """A buffer that comes from all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.mean = sum(weight.detach().mean() for weight in self.parameters()) * 0.1


class Vector(Walks):
    """Changes all weights through one vector."""

    def on_train_batch_end(self, *_: Any) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.99, self.parameters())


class Trusting(Walks):
    """An optimizer that takes it that every parameter has a gradient."""

    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            for weight in self.param_groups[0]["params"]:
                weight.data.add_(weight.grad.mul(-0.1))
            return loss

    def configure_optimizers(self) -> Any:
        return self.Plain(self.parameters(), lr=0.1)


REFUSED: dict[str, tuple[type[Walks], str]] = {
    "joins": (Joins, "Normalised.step joins numbers of several parameters: 'stack' at "),
    "sums": (SumsNorms, "lightning.pytorch.utilities.grad_norm"),
    "histograms": (Histograms, "'numpy' needs a value that is not here: Rank "),
    "unnamed": (Unnamed, "checkpoint['averages'][0] comes from parameters of other ranks"),
    "mixed": (Mixed, "No rank has the value of 'mean'"),
    "vector": (Vector, "not through one vector of all of them"),
    "distils": (Distils, "a teacher whose layers follow a student's needs one device"),
}


def refused(process: int, name: str, folder: Path) -> None:
    fit(REFUSED[name][0], 2, folder)


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_one_device_can_do(name: str, folder: Path) -> None:
    ended = outcomes(refused, 2, timeout=40, group_timeout=None, name=name, folder=folder)
    for outcome in ended:
        assert isinstance(outcome.error, PipeError)
        assert REFUSED[name][1] in str(outcome.error)


def test_an_optimizer_that_misses_gradients_is_told_why(folder: Path) -> None:
    for outcome in outcomes(trusting, 2, timeout=40, group_timeout=None, folder=folder):
        assert isinstance(outcome.error, AttributeError)
        assert "parameters of other ranks have no gradient" in "".join(outcome.error.__notes__)


def trusting(process: int, folder: Path) -> None:
    fit(Trusting, 2, folder)
