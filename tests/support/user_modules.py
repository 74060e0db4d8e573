"""LightningModules, callbacks and data that do what users do, for the cases of `trainer_runs`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from tests.support.lit_modules import Data, Lit, dataset

# ------------------------------------------------------------------ modules


class BuiltInConfigureModel(Lit):
    """Builds its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            self.model = Lit().model.double()


class BuiltInSetup(BuiltInConfigureModel):
    """Builds its layers in ``setup``."""

    def configure_model(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        super().configure_model()


class HeadInSetup(Lit):
    """Builds a head in ``setup``, when the number of classes is known."""

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Linear | None = None

    def setup(self, stage: str) -> None:
        if self.head is None:
            torch.manual_seed(3)
            self.head = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(super().forward(x))


class WithShared(nn.Module):
    """A layer that has a module in common with others."""

    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


class OneType(Lit):
    """Relies on all parameters having the Trainer's type; has a weight that is an attribute, made from parameters.

    Layers of all stages have modules inside, and one of these in common.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model[0] = nn.utils.weight_norm(self.model[0])
        shared = nn.Linear(16, 16)
        for number in (0, 2, 4):
            self.model[number] = WithShared(shared, self.model[number])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert {parameter.dtype for parameter in self.parameters()} == {self.dtype}
        return super().training_step(batch, batch_idx)


class TwoTrainingSets(Lit):
    """Joins the batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (torch.cat([batch["a"][i], batch["b"][i]]) for i in range(2))
        return super().training_step((x, y), batch_idx)


class StopsItself(Lit):
    """Asks the Trainer to stop, on one process alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class OwnSGD(Lit):
    """Trains with SGD; by default the last layer alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model[-1].parameters(), lr=0.1)


class ClippedInParts(Lit):
    """On one device: clips by a norm that is added up as two ranks do, from that of each stage."""

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        first = [*self.embed.parameters(), *self.model[0].parameters()]
        stages = (first, list(self.model[1:].parameters()))
        norms = [nn.utils.get_total_norm([parameter.grad for parameter in stage]) for stage in stages]
        norm = torch.stack([norm.double() ** 2 for norm in norms]).sum().sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), float(gradient_clip_val), norm.float())


class Counts(callbacks.Callback):
    """Counts rows by metrics of its own, of which one is copied in every epoch."""

    def __init__(self) -> None:
        self.rows, self.tracked = (
            torchmetrics.SumMetric(),
            torchmetrics.MetricTracker(torchmetrics.SumMetric(), maximize=True),
        )

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.tracked.increment()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for metric in (self.rows, self.tracked):
            metric.update(len(batch[0]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("rows_of_callback", self.rows.compute())
        module.log("rows_of_epoch", self.tracked.compute())


class Finetuned(callbacks.BaseFinetuning):
    """Trains the embedding from the second epoch on, and two layers from the third."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.embed, module.model[:3]])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group([module.embed, module.model[:3]][epoch - 1], optimizer, lr=0.01)


class Thawed(Lit):
    """Has an optimizer for what is trained at first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class SeveralHooks(Lit):
    """Overrides the hooks around the optimizer, and puts a hook on a parameter.

    Steps use collectives, which not all ranks run to their end, and return more than the loss for a hook to read. Two
    groups of parameters have rates of their own, which a monitored value of the last stage lowers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.model[0].weight.register_hook(self.halve)

    def halve(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.strategy.barrier()
        assert self.trainer.log_dir is None or self.trainer.log_dir
        self.log("gathered", self.all_gather(torch.ones(2)).sum())
        loss = super().training_step(batch, batch_idx)
        self.log("gathered_loss", self.all_gather(loss.detach()).mean())
        return {"loss": loss, "labels": batch[1], "two": torch.tensor(2.0)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("labels", outputs["labels"].double().mean() * outputs["two"])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("old_gradients", float(any(p.grad is not None for p in self.parameters())))

    def backward(self, loss: Tensor) -> None:
        (loss * 2.0).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        rest = [*self.embed.parameters(), *self.model[:-1].parameters()]
        optimizer = torch.optim.SGD(
            [{"params": self.model[-1].parameters(), "lr": 0.1}, {"params": rest, "lr": 0.01}], momentum=0.9
        )
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        scheduler = {"scheduler": scheduler, "monitor": "val_loss/dataloader_idx_0"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Means(Lit):
    """Logs what does not depend on how the batch is cut, and keeps what every micro-batch leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("labels", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("inputs", torch.zeros(3, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.counts:
            self.rows += len(x)
            self.labels += torch.bincount(y, minlength=4)
            self.inputs = self.inputs + x.sum(0)
        self.seen_before_layers.update(len(x))
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        if self.counts:
            self.train_losses.append(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("rows", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", x.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", x.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("by_hand", y.double().mean(), batch_size=len(x), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("rows_kept", float(self.rows))
        self.log("losses_kept", float(len(self.train_losses) > 0))
        self.log("tokens", self.seen_before_layers.compute())


class Watched(nn.Linear):
    """A layer with a metric of its own."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.seen = torchmetrics.SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.update((x.detach() > 0).sum())
        return super().forward(x)


class Watching(Means):
    """Has a metric inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0] = Watched(16, 16)


# ------------------------------------------------------------------ data


def augment(items: list[Any]) -> Any:
    """Adds noise drawn from three global generators."""
    x, y = default_collate(items)
    return x + 0.1 * torch.randn_like(x) * random.random() * np.random.rand(), y


class Augmented(Data):
    """Random augmentation while batches are put together."""

    def train_dataloader(self) -> DataLoader:
        context = "fork" if self.workers else None
        return DataLoader(
            dataset(self.length),
            batch_size=8,
            shuffle=True,
            collate_fn=augment,
            num_workers=self.workers,
            multiprocessing_context=context,
        )


class AugmentedByWorkers(Augmented):
    """... in worker processes."""

    def __init__(self, length: int = 28) -> None:
        super().__init__(length, workers=2)


class TwoValidationLoaders(Data):
    """Validation sets of different sizes."""

    def val_dataloader(self) -> Any:
        return [DataLoader(dataset(12, seed=4), batch_size=8), DataLoader(dataset(7, seed=5), batch_size=5)]


class Combined(Data):
    """Two loaders that are read side by side; the shorter one starts again."""

    def train_dataloader(self) -> Any:
        return {"a": DataLoader(dataset(8), batch_size=4), "b": DataLoader(dataset(12, seed=9), batch_size=4)}


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter([dataset(20)[i] for i in range(20)])


class Streamed(Data):
    """A loader without length."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=8)


class Single(Data):
    """The data in float32."""

    @staticmethod
    def loader(length: int, seed: int, shuffle: bool) -> DataLoader:
        x, y = dataset(length, seed).tensors
        return DataLoader(TensorDataset(x.float(), y), batch_size=8, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.length, 3, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(12, 4, shuffle=False)
