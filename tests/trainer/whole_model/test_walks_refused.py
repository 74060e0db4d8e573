"""What hooks do to all layers and only one device can do is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.errors import PipeError
from tests.support.processes import refusals
from tests.support.walks import DECAY, ListAverage, Teacher, TeacherByData, Walks
from tests.trainer.whole_model.test_walks import fit


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


class DistilsByData(TeacherByData):
    """... and follows by assigned data, of which torch tells nobody: its values would be NaN."""

    training_step = Distils.training_step


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


REFUSED: dict[type[Walks], tuple[type[Exception], str]] = {
    Joins: (PipeError, "Normalised.step joins numbers of several parameters: "),
    SumsNorms: (PipeError, "trainer.strategy.grad_norm()"),
    Histograms: (PipeError, "'numpy' needs a value that is not here: Rank "),
    Unnamed: (PipeError, "checkpoint['averages'][0] comes from parameters of other ranks"),
    Mixed: (PipeError, "No rank has the value of 'mean'"),
    Vector: (PipeError, "not through one vector of all of them"),
    Distils: (PipeError, "a teacher whose layers follow a student's needs one device"),
    DistilsByData: (PipeError, "a teacher whose layers follow a student's needs one device"),
    Trusting: (AttributeError, "parameters of other ranks have no gradient"),
}


def refused(process: int, kind: type[Walks], folder: Path) -> None:
    fit(kind, 2, folder)


def test_what_only_one_device_can_do(tmp_path: Path) -> None:
    for module, errors in refusals(refused, 2, REFUSED, folder=tmp_path).items():
        kind, words = REFUSED[module]
        for error in errors:
            assert isinstance(error, kind)
            assert words in "\n".join([str(error), *getattr(error, "__notes__", [])])
