"""Programs whose LightningModule changes its own attributes, buffers and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe import skip
from tests.support.state_programs import BATCH_WHOLE, MICRO_BATCHES, STALE, WIDTH, Base, program


@program(BATCH_WHOLE)
class Plain(Base):
    """Changes nothing."""


@program(MICRO_BATCHES, train_chimera=r"self\.outputs")
class OutputsAppend(Base):
    def make(self) -> None:
        self.outputs = list[Tensor]()

    def behind(self, out: Tensor) -> Tensor:
        loss = super().behind(out)
        self.outputs.append(loss.detach())
        return loss

    def seen(self) -> list[Any]:
        return [len(self.outputs), sum(map(float, self.outputs))]


class Counts(Base):
    def make(self) -> None:
        self.count = 0

    def seen(self) -> list[Any]:
        return [self.count]


@program(MICRO_BATCHES, train=STALE)
class CounterBefore(Counts):
    def before(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + 0.1 * self.count)


@program(MICRO_BATCHES, train=STALE)
class CounterBetween(Counts):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden + 0.1 * self.count

    def behind(self, out: Tensor) -> Tensor:
        self.count += 1
        return super().behind(out)


@program(MICRO_BATCHES, train_chimera=r"self\.count")
class CounterBehind(Counts):
    def behind(self, out: Tensor) -> Tensor:
        self.count += 1
        return super().behind(out)


@program(MICRO_BATCHES, train_chimera=STALE)
class CounterBehindWeighs(CounterBehind):
    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * (1 + 0.1 * self.count)


@program(MICRO_BATCHES, train_chimera=STALE)
class CounterBeforeReadBehind(Counts):
    def before(self, x: Tensor) -> Tensor:
        self.count += 1
        return x

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * (1 + 0.1 * self.count)


@program(BATCH_WHOLE)
class CounterInAHook(Counts):
    """The remedy: counts batches, and all stages read it."""

    def before(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.count)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.parts == 0:
            self.count += 1


@program(MICRO_BATCHES, train=STALE)
class PathByACounter(Counts):
    def between(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * 2.0 if self.count % 2 else hidden + 1.0


@skip.skippable(stash=["early"])
class Stashes(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield skip.stash("early", x * 1.5)
        return super().forward(x)


@skip.skippable(pop=["early"])
class Pops(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        early = yield skip.pop("early")
        return super().forward(x + early)


@program(MICRO_BATCHES, train=STALE)
class PathBesideASkip(PathByACounter):
    """What takes its own way past a stage must not meet another path there."""

    def make(self) -> None:
        super().make()
        self.layers[0], self.layers[3] = Stashes(WIDTH, WIDTH), Pops(WIDTH, WIDTH)


@program(MICRO_BATCHES, train=STALE)
class PicksATensor(Counts):
    def between(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return [hidden * 2.0, hidden * 3.0][self.count % 2]


@program(MICRO_BATCHES, train=STALE)
class PicksAParameter(Counts):
    def make(self) -> None:
        super().make()
        self.tables = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1.0 + each)) for each in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * self.tables[self.count % 2]


@program(MICRO_BATCHES, train=STALE)
class MasksTheBatch(Counts):
    def before(self, x: Tensor) -> Tensor:
        self.count += 1
        x = x.clone()
        x[:, self.count % WIDTH] = 0.0
        return x


# ------------------------------------------------------------------ annealing


@program(BATCH_WHOLE)
class AnnealedByTheGlobalStep(Base):
    def before(self, x: Tensor) -> Tensor:
        return x * min(1.0, 0.1 + self.global_step / 10)

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * (1 + min(1.0, self.global_step / 10))


@program(BATCH_WHOLE, train_chimera=r"self\.beta")
class SetsBetaByTheGlobalStep(Base):
    def before(self, x: Tensor) -> Tensor:
        self.beta = min(1.0, 0.1 + self.global_step / 10)
        return x * self.beta

    def behind(self, out: Tensor) -> Tensor:
        return super().behind(out) * self.beta

    def seen(self) -> list[Any]:
        return [self.beta]


@program(BATCH_WHOLE)
class AnnealedByAMetric(Base):
    """A hook makes it of what the batch before has logged."""

    def make(self) -> None:
        self.scale, self.losses = 1.0, list[float]()

    def before(self, x: Tensor) -> Tensor:
        return x * self.scale

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.scale = 1 + float(self.trainer.callback_metrics["loss"])


@program(MICRO_BATCHES, train=STALE)
class LastOutputBefore(Base):
    """As recurrent nets that keep their state."""

    def make(self) -> None:
        self.state: Tensor | None = None

    def before(self, x: Tensor) -> Tensor:
        return x if self.state is None else x + self.state

    def behind(self, out: Tensor) -> Tensor:
        self.state = out.detach().mean(0)
        return super().behind(out)
