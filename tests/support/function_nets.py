"""Networks that run their layers within a ``torch.autograd.Function`` of their own, or beside one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.support.small_net import WIDTH, Block, Net


class Again(Function):
    """Keeps the input of a layer alone, and computes it again in its backward."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer, ctx.state = layer, torch.get_rng_state()
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.set_rng_state(before)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class WithWeights(Function):
    """Has the weights as arguments, and returns their gradients."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, *weights)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.layer(x), [x, *weights], gradient)


class ByVjp(Function):
    """The same by ``torch.func``, with a context of its own."""

    @staticmethod
    def forward(layer: Any, x: Tensor, *weights: Tensor) -> Tensor:
        return layer(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layer, x, *weights = inputs
        ctx.save_for_backward(x, *weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        names = [name for name, _ in ctx.layer.named_parameters()]

        def call(x: Tensor, *weights: Tensor) -> Tensor:
            return torch.func.functional_call(ctx.layer, dict(zip(names, weights, strict=True)), (x,))

        return None, *torch.func.vjp(call, x, *weights)[1](gradient)


class Stored(Function):
    """Keeps the graph of the forward, which ends at the input."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.autograd.backward(ctx.y, gradient)
        return None, ctx.x.grad


class Behind(Function):
    """The graph of the forward goes on behind the input, and its own backward does half of the work."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.y = layer(x)
            ctx.x = x
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.autograd.backward(ctx.y, 0.5 * gradient, retain_graph=True)
        return None, torch.autograd.grad(ctx.y, ctx.x, 0.5 * gradient, retain_graph=True)[0]


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return Again.apply(layer, Same.apply(x)) * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = Again.apply(ctx.layer, Same.apply(x)) * 2.0
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Same(Function):
    """Returns what it is given; gradients change on their way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Scaled(Function):
    """One weight is an argument; its backward finds the gradients of the others by itself."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, scale)
        return layer(x) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.layer(x) * scale
        torch.autograd.backward(y, gradient)
        return None, x.grad, scale.grad


class Own(Net):
    """One Function around each layer."""

    kind: Any = Again

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.kind.apply(layer, h)
            assert h.requires_grad  # on stages that wait too
        return h


class OwnWithWeights(Own):
    kind = WithWeights

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + self.kind.apply(layer, h, *layer.parameters())
        return h


class OwnByVjp(OwnWithWeights):
    kind = ByVjp


class OwnStored(Own):
    kind = Stored


class OwnBehind(Own):
    kind = Behind


class OwnScaled(Own):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scale, strict=True):
            h = Scaled.apply(layer, h, scale)
        return h


class ScaledInLayers(Net):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(super().forward, x, self.scale)


class OwnNested(Own):
    kind = Nested


class Residual(Own):
    """What goes into a Function is needed behind it, by the last layer as well."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            h = Same.apply(h) + self.kind.apply(layer, h)
        return h * first


class Prepared(Own):
    """Works on the input before it calls the layer, with a module and with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = Again.apply(lambda h, layer=layer: layer(self.norm(h.contiguous() * self.scale)) + h, h)
        return h


class Coupled(Function):
    """A reversible pair of layers: its backward finds the input again from the output."""

    @staticmethod
    def forward(ctx: Any, one: Any, two: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        left = left + one(right)
        right = right + two(left)
        ctx.one, ctx.two = one, two
        y = torch.cat([left, right], 1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (left, right), (to_left, to_right) = ctx.saved_tensors[0].chunk(2, 1), gradient.chunk(2, 1)
        right, to_left = Coupled.back(ctx.two, left, right, to_left, to_right)
        left, to_right = Coupled.back(ctx.one, right, left, to_right, to_left)
        return None, None, torch.cat([to_left, to_right], 1)

    @staticmethod
    def back(layer: Any, x: Tensor, y: Tensor, to_x: Tensor, to_y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = layer(x)
        torch.autograd.backward(out, to_y)
        return y - out.detach(), to_x + x.grad


class Reversible(Net):
    """Two layers in each Function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH // 2) for _ in range(4))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for one, two in zip(self.layers[::2], self.layers[1::2], strict=True):
            h = Coupled.apply(one, two, h)
        return h


class InsideCheckpoints(Own):
    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = checkpoint(Again.apply, layer, h, use_reentrant=self.reentrant)
        return h


class InsideReentrant(InsideCheckpoints):
    reentrant = True


class AroundCheckpoints(Own):
    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = Again.apply(lambda h, layer=layer: checkpoint(layer, h, use_reentrant=self.reentrant), h)
        return h


class AroundReentrant(AroundCheckpoints):
    reentrant = True


class InLayers(Net):
    """A Function, and backward passes, entirely inside a layer; by a name of its own."""

    class block(Block):
        again = staticmethod(Again.apply)
        behind = staticmethod(Behind.apply)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(super().forward, self.behind(super().forward, x))


class FrozenFirst(Own):
    """Nothing comes back through the first layers, on one device neither; there is a cut inside the Function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(Block(WIDTH // 2) for _ in range(2)), Block(), Block()])

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = Coupled.apply(*self.layers[:2], h)
        for layer in self.layers[2:]:
            h = Again.apply(layer, h.requires_grad_())
        return h
