"""Programs whose state reaches calls under another name: aliases, keywords, parameters that are no one's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.state_programs import BATCH_WHOLE, MICRO_BATCHES, STALE, WIDTH, Base, Layer, program
from tests.support.state_programs_own import Counts


class Shrinks(Base):
    """A tensor that the step shrinks behind the layers, and computes with before them."""

    def start(self) -> Tensor:
        return torch.ones(WIDTH, dtype=torch.float64)

    def setup(self, stage: str) -> None:
        self.state = self.start().to(self.trainer.strategy.root_device)

    def before(self, x: Tensor) -> Tensor:
        return x * self.state

    def behind(self, out: Tensor) -> Tensor:
        self.state = self.state * 0.9
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE)
class LeafBefore(Shrinks):
    """A leaf of the graph that is no parameter."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.state.requires_grad_()

    def behind(self, out: Tensor) -> Tensor:
        self.state = (self.state.detach() * 0.9).requires_grad_()
        return Base.behind(self, out)


@program(MICRO_BATCHES, train=STALE)
class SparseBefore(Shrinks):
    def start(self) -> Tensor:
        return torch.eye(WIDTH, dtype=torch.float64).to_sparse()

    def before(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.state, x.T).T


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class HiddenParameterBefore(Base):
    """In a list, where no module registers it."""

    def setup(self, stage: str) -> None:
        start = torch.ones(WIDTH, dtype=torch.float64, device=self.trainer.strategy.root_device)
        self.hidden = [nn.Parameter(start, requires_grad=False)]

    def before(self, x: Tensor) -> Tensor:
        return x * self.hidden[0]

    def behind(self, out: Tensor) -> Tensor:
        with torch.no_grad():
            self.hidden[0].mul_(0.9)
        return super().behind(out)


@program(MICRO_BATCHES, train_chimera=STALE)
class BufferByItsDataBehind(Base):
    def make(self) -> None:
        self.register_buffer("mean", torch.ones(WIDTH))

    def behind(self, out: Tensor) -> Tensor:
        loss = super().behind(out * self.mean.clone())
        self.mean.data.mul_(0.9)
        return loss

    def seen(self) -> list[Any]:
        return [self.mean.sum()]


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class ParameterByItsDataBehind(BufferByItsDataBehind):
    def make(self) -> None:
        self.mean = nn.Parameter(torch.ones(WIDTH))


@program(MICRO_BATCHES, train=STALE)
class KeywordBetween(Counts):
    def between(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return torch.clamp(hidden, **{"min" if self.count % 3 else "max": 0.05})

    def before(self, x: Tensor) -> Tensor:
        return torch.clamp(x, **{"min" if self.count % 3 else "max": 0.05})


class WithOptions(Layer):
    def forward(self, x: Tensor, gain: float = 1.0, bias: float = 0.0) -> Tensor:
        return super().forward(x) * gain + bias


@program(MICRO_BATCHES, train=STALE)
class KeywordOfALayer(Counts):
    layer = WithOptions

    def step(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x, **{"gain" if self.count % 3 else "bias": 0.5})
        self.count += 1
        return self.behind(self.layers[1:](hidden))


@program(MICRO_BATCHES, train=STALE)
class BatchByAView(Shrinks):
    def before(self, x: Tensor) -> Tensor:
        left, right = x[:, :1], x[:, 1:]
        x.mul_(self.state)
        return torch.cat([left, right], 1)


@program(MICRO_BATCHES, train=STALE)
class BatchByItsData(Shrinks):
    def before(self, x: Tensor) -> Tensor:
        x.data.mul_(self.state)
        return x


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class BatchByItsArray(Shrinks):
    def before(self, x: Tensor) -> Tensor:
        array = x.numpy()
        array *= self.state.clone().numpy()
        return x


class Taking(Layer):
    def forward(self, x: Tensor, taken: Any = None) -> Tensor:
        x = super().forward(x)
        return x if taken is None else self.use(x, taken)

    def use(self, x: Tensor, taken: Any) -> Tensor:
        return taken(x)  # type: ignore[no-any-return]


class Gives(Counts):
    """The first layer is given what depends on a counter."""

    layer = Taking

    def given(self) -> Any:
        raise NotImplementedError

    def step(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x, self.given())
        self.count += 1
        return self.behind(self.layers[1:](hidden))


@program(MICRO_BATCHES, train=STALE)
class GivesAFunction(Gives):
    def given(self) -> Any:
        return torch.tanh if self.count % 3 else torch.sigmoid


@program(MICRO_BATCHES, train=STALE)
class GivesAClosure(Gives):
    def given(self) -> Any:
        gain = 1 + self.count
        return lambda x: x * gain


@program(MICRO_BATCHES, train=STALE)
class GivesAMethod(Gives):
    def gained(self, x: Tensor) -> Tensor:
        return x * (1 + self.count)

    def given(self) -> Any:
        return self.gained


class ByCount(Taking):
    def use(self, x: Tensor, taken: Any) -> Tensor:
        return x * (1 + taken.count)


@program(MICRO_BATCHES, train=STALE)
class GivesItself(Gives):
    layer = ByCount

    def given(self) -> Any:
        return self


class ByKeys(Taking):
    def use(self, x: Tensor, taken: Any) -> Tensor:
        return x * taken.get("gain", 1.0) + taken.get("bias", 0.0)


@program(MICRO_BATCHES, train=STALE)
class GivesKeys(Gives):
    layer = ByKeys

    def given(self) -> Any:
        return {"gain" if self.count % 3 else "bias": 0.5}


@program(MICRO_BATCHES, train=r"exchanges `self\.layers\.0\.drop`", evaluate=r"exchanges `self\.layers\.0\.drop`")
class ExchangesAPart(Counts):
    def step(self, x: Tensor) -> Tensor:
        self.layers[0].drop = nn.Identity()
        return self.behind(self.layers(x))


class Rated(Base):
    """The step sets the learning rate behind the layers."""

    remedy = "RateByTheStep"

    def rate(self, group: dict[str, Any]) -> float:
        return 0.1 / (1 + self.global_step)

    def behind(self, out: Tensor) -> Tensor:
        for group in (group for each in self.trainer.optimizers for group in each.param_groups):
            group["lr"] = self.rate(group)
        return super().behind(out)


@program(BATCH_WHOLE)
class RateByTheStep(Rated):
    pass


_CHANGES = "each run of the step changes a setting of an optimizer"


@program(MICRO_BATCHES, train=_CHANGES)
class RateByTheRate(Rated):
    def rate(self, group: dict[str, Any]) -> float:
        return group["lr"] * 0.9  # type: ignore[no-any-return]


@program(MICRO_BATCHES, train=_CHANGES)
class StepsAScheduler(Base):
    remedy = "RateByTheStep"

    def behind(self, out: Tensor) -> Tensor:
        if self.trainer.training:
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return super().behind(out)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ByItsClass(Layer):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor  # type: ignore[no-any-return]


@program(MICRO_BATCHES, train=STALE, evaluate=STALE)
class FactorOfAClass(Base):
    layer = ByItsClass

    def behind(self, out: Tensor) -> Tensor:
        ByItsClass.factor *= 0.9
        return super().behind(out)


@program(MICRO_BATCHES, train=STALE)
class WithoutGradients(Counts):
    def step(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.count % 3 > 0):
            hidden = self.layers[0](x)
        self.count += 1
        return self.behind(self.layers[1:](hidden))


class Tagged(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "gain", 1.0)  # type: ignore[no-any-return]


@program(BATCH_WHOLE)
class TagsBetween(Base):
    """The attribute of a tensor, for a layer of a later stage."""

    layer = Tagged

    def step(self, x: Tensor) -> Tensor:
        hidden: Any = self.layers[:2](x)
        hidden.gain = 0.5
        return self.behind(self.layers[2:](hidden))


@program(MICRO_BATCHES, train=STALE)
class TagsBefore(Counts):
    layer = Tagged

    def step(self, x: Tensor) -> Tensor:
        tagged: Any = x
        tagged.gain = 1 + self.count
        self.count += 1
        return self.behind(self.layers(tagged))
