"""Random steps: modules whose forward runs a random program of torch calls between, before and behind its layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.model_zoo import Entry
from tests.support.zoo.base import Block, Module

WIDTH = 4
MOST = 6
"""Variables that a program holds at a time."""


class Plain(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class InPlace(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(0.9))


class Pair(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.square().mean(), None


class Two(Plain):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return torch.tanh(self.linear(x) + (0 if other is None else 0.5 * other))


class Dictionary(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "view": y[:, :2], "number": 3}


class Transposing(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).t().contiguous().t()


class Keeping(Plain):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.kept = y[:, 1:]
        return y


class Noting(Plain):
    def forward(self, x: Tensor, notes: list[Tensor]) -> Any:
        y = super().forward(x)
        notes.append(y)
        return y


LAYERS = [Plain, Plain, InPlace, Pair, Two, Dictionary, Transposing, Keeping, Noting]

Operation = Callable[["Program", Tensor, Tensor, int, Tensor], Tensor | None]
"""``(program, a, b, k, x) -> new variable``, or ``None`` where ``a`` changes in place; ``x`` is the batch."""

NEW: list[Operation] = [
    lambda p, a, b, k, x: torch.tanh(a),
    lambda p, a, b, k, x: -a,
    lambda p, a, b, k, x: a * p.scale[k],
    lambda p, a, b, k, x: p.norms[k % 2](a),
    lambda p, a, b, k, x: torch.tanh(p.linears[k % 2](a)),
    lambda p, a, b, k, x: p.activation(a),
    lambda p, a, b, k, x: a + p.buffer,
    lambda p, a, b, k, x: a.t().contiguous().t(),
    lambda p, a, b, k, x: a.clone(),
    lambda p, a, b, k, x: a.detach(),
    lambda p, a, b, k, x: a.contiguous(),
    lambda p, a, b, k, x: a.to(a.dtype),
    lambda p, a, b, k, x: a.float().double(),
    lambda p, a, b, k, x: a.reshape(-1).view(a.shape),
    lambda p, a, b, k, x: a.reshape(len(a), 2, 2).transpose(1, 2).reshape(a.shape),
    lambda p, a, b, k, x: a.flip(1),
    lambda p, a, b, k, x: F.relu(a),
    lambda p, a, b, k, x: a.softmax(-1),
    lambda p, a, b, k, x: torch.cat(a.chunk(2, 1)[::-1], 1),
    lambda p, a, b, k, x: torch.stack(a.unbind(1)[::-1], 1),
    lambda p, a, b, k, x: a.masked_fill(x > 0.5, 0.0),
    lambda p, a, b, k, x: F.pad(a[:, :3], (0, 1)),
    lambda p, a, b, k, x: F.dropout(a, 0.0, True),
    lambda p, a, b, k, x: a[:, :1].expand(-1, WIDTH),
    lambda p, a, b, k, x: a[:, torch.arange(WIDTH).roll(k)],
    lambda p, a, b, k, x: p.keep(a),
    lambda p, a, b, k, x: a + b,
    lambda p, a, b, k, x: torch.tanh(a) * torch.tanh(b),
    lambda p, a, b, k, x: torch.lerp(a, b, 0.3),
    lambda p, a, b, k, x: torch.stack([a, b]).mean(0),
    lambda p, a, b, k, x: torch.where(x > 0, a, b),
    lambda p, a, b, k, x: torch.cat([a, b], 1)[:, 1 : WIDTH + 1],
    lambda p, a, b, k, x: torch.full_like(x, 0.5),
    lambda p, a, b, k, x: x[:],
    lambda p, a, b, k, x: _filled(torch.ones_like(x), a, k),
]


def _filled(own: Tensor, a: Tensor, k: int) -> Tensor:
    own[:, :2].copy_(a[:, :2])
    own.view(-1)[k::WIDTH] = a[:, 3]
    return own


def _set(a: Tensor, b: Tensor, k: int) -> None:
    a[:, k] = b[:, 0].tanh()


CHANGES: list[Operation] = [
    lambda p, a, b, k, x: _nothing(a.add_(0.1)),
    lambda p, a, b, k, x: _nothing(a.mul_(0.9)),
    lambda p, a, b, k, x: _set(a, b, k),
    lambda p, a, b, k, x: _nothing(a.__iadd__(b.tanh())),
    lambda p, a, b, k, x: _nothing(F.relu_(a)),
    lambda p, a, b, k, x: _nothing(a.addcmul_(b, x, value=0.1)),
    lambda p, a, b, k, x: _nothing(a[:, :2].copy_(b[:, :2].tanh())),
]


def _nothing(_: Tensor) -> None:
    return None


@dataclass(frozen=True)
class Call:
    """One torch call: what it reads, and the variable it becomes."""

    operation: Operation
    target: int
    a: int
    b: int
    k: int
    grad: bool


@dataclass(frozen=True)
class LayerCall:
    """The call of the next layer."""

    number: int
    a: int
    b: int
    second: bool
    keeps_view: bool


@dataclass(frozen=True)
class Drop:
    """A variable goes out of scope."""

    target: int


class Program(Module):
    """A module with a random program, the same for the same seed.

    Args:
        seed: of the program and the weights.
        changes: whether variables may change in place.
    """

    learning_rate = 0.05

    def __init__(self, seed: int, changes: bool) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        count = draw.randint(4, 6)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(draw.choice(LAYERS)() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.activation = nn.PReLU()
        self.register_buffer("buffer", torch.rand(WIDTH))
        for parameter in self.parameters():
            parameter.requires_grad_(draw.random() > 0.08)
        self.kept: Tensor | None = None
        self.program: list[Call | LayerCall | Drop] = []
        for number in range(count + 1):
            for _ in range(draw.randint(0, 4)):
                operations = CHANGES if changes and draw.random() < 0.15 else NEW
                a, b, k = draw.randrange(8), draw.randrange(8), draw.randrange(4)
                self.program.append(Call(draw.choice(operations), draw.randrange(8), a, b, k, draw.random() > 0.07))
            if number < count:
                a, b = draw.choice([-1, -1, *range(8)]), draw.randrange(8)
                self.program.append(LayerCall(number, a, b, draw.random() < 0.3, draw.random() < 0.5))
            if draw.random() < 0.15:
                self.program.append(Drop(draw.randrange(8)))
        self.also_in_loss = [draw.randrange(8) for _ in range(2)]

    def keep(self, a: Tensor) -> Tensor:
        self.kept = a
        result = self.kept * 1.1
        self.kept = None
        return result

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        variables = [self.embed(batch["x"])]
        auxiliary: Any = 0.0
        notes: list[Tensor] = []
        for step in self.program:
            if isinstance(step, Call):
                self.call(step, variables, batch["x"])
            elif isinstance(step, LayerCall):
                auxiliary = auxiliary + self.call_layer(step, variables, notes)
            elif len(variables) > 1:
                variables.pop(step.target % len(variables))
            if len(variables) > MOST:
                variables.pop(0)
        loss = F.mse_loss(self.head(variables[-1]), batch["y"]) + auxiliary
        for index in self.also_in_loss:
            loss = loss + variables[index % len(variables)].square().mean()
        kept = [layer.kept for layer in self.layers if isinstance(layer, Keeping)]
        return loss + sum(tensor.mean() for tensor in kept + notes)

    def call(self, step: Call, variables: list[Tensor], x: Tensor) -> None:
        a, b = (variables[index % len(variables)] for index in (step.a, step.b))
        with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
            new = step.operation(self, a, b, step.k, x)
        if new is not None and step.target % 2:
            variables.append(new)
        elif new is not None:
            variables[step.target % len(variables)] = new

    def call_layer(self, step: LayerCall, variables: list[Tensor], notes: list[Tensor]) -> Any:
        """Calls the layer, keeps its result, and returns the loss it has of its own."""
        layer, own = self.layers[step.number], 0.0
        more: dict[str, Any] = {}
        if step.second and isinstance(layer, Two):
            more["other"] = variables[step.b % len(variables)]
        if isinstance(layer, Noting):
            more["notes"] = notes
        out = layer(variables[-1 if step.a < 0 else step.a % len(variables)], **more)
        if isinstance(out, tuple):
            out, own, _ = out
        if isinstance(out, dict):
            if step.keeps_view:
                variables.append(torch.cat([out["view"], out["view"]], 1))
            out = out["y"]
        variables.append(out)
        return own


def entry(seed: int, changes: bool) -> Entry:
    """A random program with random batches, as a model of the zoo."""
    draw = random.Random(-1 - seed)
    sizes = draw.choice([(4,), (4, 4, 3), (5, 2)])

    def batches(number: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        for index in range(number):
            rows = torch.randn(sizes[index % len(sizes)], WIDTH + 1, dtype=torch.float64, generator=generator)
            drawn.append({"x": rows[:, :WIDTH].contiguous(), "y": rows[:, WIDTH:].contiguous()})
        return drawn

    return Entry(f"program_{seed}", lambda: Program(seed, changes), batches, layers="layers")
