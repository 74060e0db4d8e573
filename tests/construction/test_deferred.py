"""Modules built without memory have, bit for bit, the values of modules that are built in the ordinary way."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_pipe.construction import deferred_init, is_deferred, materialize
from tests.support.built import all_tensors, assert_alike, deferred_tensors

WIDE = 100
"""Square weights of this width are large enough to be recorded."""


def linear() -> nn.Linear:
    return nn.Linear(WIDE, WIDE)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same tensors, bit by bit, with the same properties and ties."""
    one, other = all_tensors(found), all_tensors(expected)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert_alike(name, tensor, other[name])
    assert ties(one) == ties(other)


def ties(tensors: dict[str, Tensor]) -> list[int]:
    places = [tensor.data_ptr() for tensor in tensors.values()]
    return [places.index(place) for place in places]


def built_both_ways(make: Callable[[], nn.Module], *, some: bool = True) -> tuple[nn.Module, nn.Module]:
    """A module built without memory and one built plain, with what comes next from the generator compared."""
    torch.manual_seed(7)
    plain = make()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    with deferred_init():
        module = make()
    assert torch.equal(after, torch.get_rng_state())
    assert any(True for _ in deferred_tensors(module)) is some
    return module, plain


class Initialised(nn.Module):
    """A weight to which a function of ``torch.nn.init`` is applied."""

    def __init__(self, initialise: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDE, WIDE))
        initialise(self.weight)
        self.after = nn.Parameter(torch.rand(WIDE, WIDE))


INITIALISATIONS: dict[str, Callable[[Tensor], object]] = {
    "uniform": nn.init.uniform_,
    "normal": lambda weight: nn.init.normal_(weight, 0.5, 0.1),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "constant": lambda weight: nn.init.constant_(weight, 0.3),
    "eye": nn.init.eye_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda weight: nn.init.sparse_(weight, 0.2),
    "dirac": lambda weight: nn.init.dirac_(weight.data.view(WIDE, WIDE, 1)),
    "bernoulli": lambda weight: weight.data.bernoulli_(0.3),
    "generator": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(5)),
    "copied": lambda weight: weight.data.copy_(torch.randn(WIDE, WIDE).double()),
    "rows": lambda weight: weight.data.zero_()[3:40].normal_(),
    "transposed": lambda weight: weight.data.t().normal_(),
    "masked": lambda weight: weight.data.zero_().masked_fill_(torch.rand(WIDE, WIDE) > 0.5, 1.0),
    "scaled_by_own_norm": lambda weight: weight.data.normal_().div_(weight.data.norm()),
    # the meta kernel predicts another layout than LAPACK gives (torch 2.13)
    "decomposed": lambda weight: weight.data.copy_(torch.linalg.svd(torch.randn(WIDE, WIDE)).Vh),
    "list_of_values": lambda weight: weight.data.copy_(torch.tensor(torch.rand(WIDE, WIDE).tolist())),
}


@pytest.mark.parametrize("name", INITIALISATIONS)
def test_initialisations(name: str) -> None:
    module, plain = built_both_ways(lambda: Initialised(INITIALISATIONS[name]))
    materialize(module)
    assert_same(module, plain)


class Many(nn.Module):
    """What constructors do to tensors besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = linear(), linear()
        self.tied.weight = self.first.weight
        self.copied = copy.deepcopy(self.first)
        with torch.no_grad():
            self.copied.weight.mul_(0.5).add_(self.first.weight[:, :1])
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)).bool())
        self.register_buffer("doubled", self.first.weight.detach() * 2)
        self.double = linear().double()
        self.half = linear().half()
        self.transposed = nn.Parameter(torch.randn(WIDE, WIDE).t())
        self.replaced = nn.Parameter(torch.zeros(WIDE, WIDE))
        self.replaced.data = self.transposed.data.clone()
        self.frozen = linear().requires_grad_(False)
        self.embedding = nn.Embedding(500, WIDE, padding_idx=0)
        self.recurrent = nn.LSTM(WIDE, WIDE, 2)
        self.spectral = parametrizations.spectral_norm(linear())
        self.weighted = parametrizations.weight_norm(linear())
        self.orthogonal = parametrizations.orthogonal(linear())
        self.norm = nn.BatchNorm1d(5000)
        self.convolution = nn.Conv2d(64, 64, 3)
        self.size = self.convolution(torch.zeros(1, 64, 8, 8)).numel()
        if float(self.first.weight.detach().std()) > 0.01:
            self.decided = linear()
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.first:
                module.bias.data.fill_(0.25)
        array = torch.rand(WIDE, WIDE).numpy()
        array *= 2
        self.from_numpy = nn.Parameter(torch.from_numpy(array))
        self.written = linear()
        view = self.written.weight.detach().numpy()
        view[:10] = 3.0
        self.before = nn.Parameter(torch.zeros(WIDE, WIDE))
        self.before.data.copy_(self.written.weight.data)
        self.from_array = nn.Parameter(torch.zeros(WIDE, WIDE))
        self.from_array.data.copy_(torch.from_numpy(array))
        view[:20] = array[:20] = 4.0
        self.set = nn.Parameter(torch.zeros(WIDE, WIDE))
        self.turned = nn.Parameter(torch.rand(WIDE, 2 * WIDE))
        with torch.no_grad():
            self.set.set_(self.doubled)
            self.turned.t_()
        self.doubled.mul_(3)
        self.widened = nn.Linear(60, 60)
        self.widened.weight.data = self.widened.weight.data.double()
        self.shuffled = nn.Parameter(torch.randperm(5000).float()[torch.randperm(5000)])


def test_what_else_constructors_do() -> None:
    module, plain = built_both_ways(Many)
    objects = {name: id(tensor) for name, tensor in all_tensors(module).items()}
    materialize(module)
    assert {name: id(tensor) for name, tensor in all_tensors(module).items()} == objects
    assert_same(module, plain)
    assert not list(deferred_tensors(module))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_norm_by_hook() -> None:
    module, plain = built_both_ways(lambda: nn.utils.weight_norm(linear()))
    materialize(module)
    assert_same(module, plain)
    assert torch.equal(module(torch.ones(1, WIDE)), plain(torch.ones(1, WIDE)))


def test_parts_can_be_made_in_any_order() -> None:
    module, plain = built_both_ways(lambda: nn.Sequential(*(linear() for _ in range(4))))
    for number in (2, 0, 3, 1):
        materialize(module[number])
    assert_same(module, plain)


def test_what_an_earlier_value_was_when_it_was_read() -> None:
    def make() -> nn.Module:
        one, other = linear(), linear()
        with torch.no_grad():
            other.weight.copy_(one.weight)
            one.weight.mul_(2)
        return nn.Sequential(one, other)

    module, plain = built_both_ways(make)
    materialize(module[0])
    materialize(module[1])
    assert_same(module, plain)


def test_contexts_in_each_other() -> None:
    def make() -> nn.Module:
        with deferred_init():
            one = linear()
        return nn.Sequential(one, linear())

    torch.manual_seed(7)
    plain = nn.Sequential(linear(), linear())
    torch.manual_seed(7)
    with deferred_init():
        module = make()
    assert is_deferred(module[1].weight)
    materialize(module)
    assert_same(module, plain)


def test_small_tensors_are_ordinary_ones() -> None:
    module, plain = built_both_ways(lambda: nn.Linear(4, 4), some=False)
    assert_same(module, plain)


def test_tensors_on_the_meta_device_stay_there() -> None:
    with deferred_init(), torch.device("meta"):
        module = linear()
    assert type(module.weight) is nn.Parameter
    assert module.weight.is_meta


@pytest.mark.parametrize("change", [lambda values: values.zero_(), lambda values: values.numpy().sort()])
def test_what_is_read_from_may_change_afterwards(change: Callable[[Tensor], object]) -> None:
    values = torch.rand(WIDE, WIDE)
    before = values.clone()
    with deferred_init():
        module = linear()
        module.weight.data.copy_(values)
    change(values)
    materialize(module)
    assert torch.equal(module.weight, before)


# ---------------------------------------------------------------------- afterwards, without a pipeline


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = nn.Sequential(linear(), linear())
    fresh.load_state_dict(torch.load(file))
    return fresh


def loaded(module: nn.Module) -> nn.Module:
    values = {
        name: torch.full_like(tensor, 3.0) for name, tensor in nn.Sequential(linear(), linear()).state_dict().items()
    }
    module.load_state_dict(values)
    return module


USES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to(torch.float64),
    "half": lambda module: module.half(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "state_dict": saved_and_loaded,
    "load_state_dict": loaded,
    "requires_grad": lambda module: module.requires_grad_(False),
    "apply": lambda module: module.apply(lambda part: part.bias.data.fill_(1.0) if hasattr(part, "bias") else None),
}


@pytest.mark.parametrize("use", USES)
def test_uses(use: str) -> None:
    module, plain = built_both_ways(lambda: nn.Sequential(linear(), linear()))
    module, plain = USES[use](module), USES[use](plain)
    materialize(module)
    assert_same(module, plain)


def test_one_can_compute_with_it_at_once() -> None:
    module, plain = built_both_ways(lambda: nn.Sequential(linear(), nn.Tanh(), linear()))
    assert module[0].weight.numel() == WIDE * WIDE
    assert is_deferred(module[0].weight)
    losses = []
    for each in (module, plain):
        optimizer = torch.optim.AdamW(each.parameters())
        for _ in range(3):
            loss = each(torch.ones(2, WIDE)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[:3] == losses[3:]
    materialize(module)
    assert_same(module, plain)


def peak() -> int:
    """The most memory that this process has had since it was last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_that_of_the_largest_tensor() -> None:
    one = 1024 * 1024 * 4
    start = reset_peak()
    with deferred_init():
        module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
    assert peak() - start < 8 * one
    materialize(module[:4])
    assert peak() - start < 12 * one
