"""Optimizers that join what ranks have apart are told from those that do not."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.mixing import Mixing, check
from tests.support.pairs import slow_but

KINDS = [
    getattr(torch.optim, name)
    for name in dir(torch.optim)
    if isinstance(kind := getattr(torch.optim, name), type)
    and issubclass(kind, Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "centered": {"momentum": 0.9, "centered": True, "foreach": True},
    "differentiable": {"maximize": True, "foreach": False},
    "tensor lr": {"lr": torch.tensor(0.01), "foreach": False},
}


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    return {name: nn.Parameter(torch.randn(size)) for name, size in (("a", (3, 4)), ("b", (4, 4)), ("c", (4, 2)))}


def gradients(named: dict[str, nn.Parameter]) -> None:
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)


def watched(optimizer: Optimizer, named: dict[str, nn.Parameter]) -> Mixing:
    return Mixing(optimizer, {id(parameter): name for name, parameter in named.items()})


def made(kind: Callable[..., Optimizer], options: dict[str, Any]) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    named = parameters()
    return kind(list(named.values()), **{"lr": 0.01, **options}), named


def has(kind: Callable[..., Optimizer], way: str) -> bool:
    """Whether an optimizer has the options of a way."""
    try:
        made(kind, WAYS[way])
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


CASES = [(kind, way) for kind in KINDS for way in WAYS if has(kind, way)]


def test_every_optimizer_and_every_way_is_among_the_cases() -> None:
    assert {kind for kind, _ in CASES} == set(KINDS)
    assert {way for _, way in CASES} == set(WAYS)


SOME = [(kind, way) for kind, way in CASES if way == "plain" or kind is torch.optim.Adam]


@pytest.mark.parametrize(("kind", "way"), slow_but(CASES, *SOME))
def test_torchs_optimizers_join_nothing(kind: Callable[..., Optimizer], way: str) -> None:
    optimizer, named = made(kind, WAYS[way])
    gradients(named)
    optimizer.step()  # then there is state, as after loading a checkpoint
    gradients(named)
    before = deepcopy([[*named.values()], optimizer.state_dict()["state"]])
    check(optimizer, named)
    after = [[*named.values()], optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_optimizers_are_not_tried(kind: Callable[..., Optimizer]) -> None:
    optimizer, named = made(kind, {})
    assert watched(optimizer, named).done


def test_options_of_a_first_step_are_copied_as_they_are() -> None:
    """Groups may have ``None``, which is also the state of parameters that are left out (``eps`` of Adafactor)."""
    optimizer, named = made(torch.optim.Adafactor, {})
    gradients(named)
    check(optimizer, {name: named[name] for name in "ab"})


def test_sparse_gradients() -> None:
    tables = {name: nn.Embedding(5, 3, sparse=True) for name in "ab"}
    optimizer = torch.optim.SparseAdam([table.weight for table in tables.values()])
    named = {name: table.weight for name, table in tables.items()}
    sum(table(torch.tensor([1, 2, 1])).sum() for table in tables.values()).backward()
    check(optimizer, named)
    assert all(table.weight.grad.is_sparse for table in tables.values())


class Own(Optimizer):
    """An optimizer of one's own; ``update`` is its step."""

    def __init__(self, params: Any, update: Callable[[Own], None], **_: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = update

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        with torch.no_grad():
            self.update(self)
        return loss

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter.grad


def apart_lars(own: Own) -> None:
    """A rate for each parameter, from norms that are read, with a decision by each."""
    for parameter, gradient in own.pairs():
        norm, size = gradient.norm().item(), parameter.norm()
        if size > 0 and parameter.ndim > 1:
            ratio = max(size.item(), 1e-3) / (norm + 1e-9)
            parameter.add_(gradient, alpha=-0.1 * ratio)
        else:
            parameter.add_(gradient, alpha=-0.1)


def apart_float(own: Own) -> None:
    for parameter, gradient in own.pairs():
        parameter.sub_(gradient / float(gradient.norm()))


def apart_bias_unread(own: Own) -> None:
    for number, (parameter, gradient) in enumerate(own.pairs()):
        if number != 1 and bool(torch.isfinite(gradient).all()):
            gradient = gradient / float(gradient.norm())
        parameter.data = parameter.data - 0.1 * gradient


def apart_scratch(own: Own) -> None:
    scratch, shared = torch.zeros(16), torch.tensor(0.5)
    for parameter, gradient in own.pairs():
        part = scratch[: gradient.numel()]
        part.copy_(gradient.view(-1))
        torch.mul(part, shared.to(parameter), out=part)
        parameter.add_(part.view_as(parameter) * shared.pow(2.0), alpha=-0.1)


def apart_state(own: Own) -> None:
    for parameter, gradient in own.pairs():
        state = own.state[parameter]
        state["rate"] = gradient.norm().item()
        state.setdefault("average", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
        parameter.addcdiv_(state["average"], gradient.abs() + 1.0, value=-state["rate"])


def apart_noise(own: Own) -> None:
    for parameter, gradient in own.pairs():
        parameter.sub_(gradient + torch.randn_like(gradient), alpha=0.1)


APART = [each for name, each in globals().items() if name.startswith("apart_")]


@pytest.mark.parametrize("update", APART)
def test_what_treats_every_parameter_by_itself(update: Callable[[Own], None]) -> None:
    found = []
    for watching in (False, True):
        optimizer, named = made(Own, {"update": update})
        gradients(named)
        mixing = watched(optimizer, named) if watching else None
        torch.manual_seed(5)
        optimizer.step()
        assert mixing is None or mixing.done
        found.append([*named.values()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class Ahead(Optimizer):
    """Wraps an optimizer, with the same parameters."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


@pytest.mark.parametrize(("update", "joins"), [("apart_noise", False), ("joins_items", True)])
def test_an_optimizer_around_another(update: str, joins: bool) -> None:
    inner, named = made(Own, {"update": globals()[update]})
    named["unused"] = nn.Parameter(torch.ones(2))
    inner.add_param_group({"params": [named["unused"]]})
    optimizer = Ahead(inner)
    gradients(named)
    named["unused"].grad = None
    before = deepcopy([*named.values()])
    chosen = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
    if joins:
        with pytest.raises(ConfigurationError, match="joins"):
            check(optimizer, chosen)
    else:
        check(optimizer, chosen)
    torch.testing.assert_close(before, [*named.values()], rtol=0, atol=0)


def test_what_is_joined_with_parameters_of_other_ranks() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = Own([weight], update=joins_items)
    watched(optimizer, {"weight": weight})
    with pytest.raises(ConfigurationError, match=r"'weight' it updates 'weight \(a copy\)'"):
        optimizer.step()


class Sharpness(Own):
    """Takes the gradient where all weights have moved by a norm of all of them, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss, before = closure(), [parameter.detach().clone() for parameter, _ in self.pairs()]
        norm = sum(gradient.square().sum() for _, gradient in self.pairs()) ** 0.5
        with torch.no_grad():
            for parameter, gradient in self.pairs():
                parameter.add_(gradient, alpha=float(0.05 / norm))
        closure()
        with torch.no_grad():
            for (parameter, gradient), value in zip(self.pairs(), before, strict=True):
                parameter.copy_(value).sub_(gradient, alpha=0.1)
        return loss


def test_what_joins_parameters_between_two_gradients() -> None:
    named = parameters()
    optimizer = Sharpness(list(named.values()), update=lambda own: None)
    watched(optimizer, named)

    def closed() -> Tensor:
        gradients(named)
        return torch.zeros(())

    with pytest.raises(ConfigurationError, match=r"Sharpness\.step joins numbers of several parameters"):
        optimizer.step(closed)


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_joins_though_gradients_and_rates_are_too_small_to_show(scale: float) -> None:
    optimizer, named = made(Own, {"update": joins_seldom})
    gradients(named)
    for parameter in named.values():
        parameter.grad = parameter.grad * scale
    optimizer.param_groups[0]["lr"] = scale  # as a warm-up begins
    watched(optimizer, named)
    with pytest.raises(ConfigurationError, match="joins"):
        optimizer.step()


def test_what_cannot_be_copied() -> None:
    optimizer, named = made(Own, {"update": apart_float})
    optimizer.lock = threading.Lock()
    gradients(named)
    watched(optimizer, named)
    with pytest.raises(ConfigurationError, match=r"could not be tried on copies of 'c', 'a': .*lock.*\n?.*AdamW"):
        optimizer.step()


def joins_items(own: Own) -> None:
    total = math.sqrt(sum(gradient.norm().item() ** 2 for _, gradient in own.pairs()))
    for parameter, gradient in own.pairs():
        parameter.sub_(gradient, alpha=0.1 / total)


def joins_decision(own: Own) -> None:
    if all(bool(torch.isfinite(gradient).all()) for _, gradient in own.pairs()):
        for parameter, gradient in own.pairs():
            parameter.sub_(gradient, alpha=0.1)


def joins_first(own: Own) -> None:
    """One parameter's number decides about the next one's update."""
    rate = 0.1
    for parameter, gradient in own.pairs():
        parameter.sub_(gradient, alpha=rate)
        rate = gradient.norm().item()


def joins_kept(own: Own) -> None:
    own.mean = getattr(own, "mean", torch.zeros(()))
    for _, gradient in own.pairs():
        own.mean.lerp_(gradient.mean(), 0.1)
    for parameter, gradient in own.pairs():
        parameter.sub_(gradient * own.mean)


def joins_estimate(own: Own) -> None:
    """A rate for all parameters, estimated as Prodigy does: from how far they have come."""
    rate, lr = getattr(own, "rate", 1e-6), own.param_groups[0]["lr"]
    own.far, denominator = getattr(own, "far", 0.0), 0.0
    for parameter, gradient in own.pairs():
        state = own.state[parameter]
        begin = state.setdefault("begin", parameter.clone())
        state["sum"] = state.get("sum", 0.0) + rate * gradient
        own.far += rate * (gradient * (begin - parameter)).sum().item()
        denominator += state["sum"].abs().sum().item()
        parameter.sub_(gradient.sign(), alpha=lr * rate)
    own.rate = max(rate, own.far / denominator)


def joins_group(own: Own) -> None:
    """What groups keep is used later."""
    for group in own.param_groups:
        group["d"] = group.get("d", 0.0) + sum(parameter.grad.sum().item() for parameter in group["params"])


def joins_seldom(own: Own) -> None:
    """Only norms above a limit change anything."""
    total = max(gradient.norm().item() for _, gradient in own.pairs())
    for parameter, gradient in own.pairs():
        parameter.sub_(gradient, alpha=own.param_groups[0]["lr"] / max(total / 1e6, 1.0))


JOINS = [each for name, each in globals().items() if name.startswith("joins_")]


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("update", JOINS)
def test_what_joins_parameters(update: Callable[[Own], None], closure: bool) -> None:
    optimizer, named = made(Own, {"update": update})

    def closed() -> Tensor:
        gradients(named)
        return torch.stack([parameter.sum() for parameter in named.values()]).sum()  # no part of the step

    if not closure:
        gradients(named)
    mixing = watched(optimizer, named)
    with pytest.raises(ConfigurationError, match=r"Own\.step joins numbers of several parameters: .* it updates '"):
        optimizer.step(closed if closure else None)
    mixing.remove()
    torch.stack([parameter.sum() for parameter in named.values()])


def test_a_step_without_gradients_is_not_the_first() -> None:
    optimizer, named = made(Own, {"update": lambda own: None})
    mixing = watched(optimizer, named)
    optimizer.step()
    assert not mixing.done
    gradients(named)
    optimizer.step()
    assert mixing.done
    mixing.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
