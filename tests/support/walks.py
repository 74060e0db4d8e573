"""Modules whose hooks keep averages and copies of the parameters and buffers of all layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.support.lit_modules import FEATURES

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


class Averaged(Walks):
    """torch's averaged weights as an attribute, made before there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, use_buffers=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.model)


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
