"""The same module built plain, and as one rank of a pipeline builds it: no processes are needed for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_pipe.construction import Deferred, deferred_init, is_deferred, materialize, tensors_of
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.partition import divide, find_layers

SEED = 11
Layers = str | Sequence[str] | None


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def deferred_tensors(module: nn.Module) -> list[Deferred]:
    """Those of a module, each once."""
    return [tensor for tensor in tensors_of(module) if isinstance(tensor, Deferred)]


def divided(module: nn.Module, rank: int, ranks: int, layers: Layers = None, seed: int = 0) -> Ownership:
    """Leave a rank its share of a module."""
    found = find_layers(module, layers)
    counts = divide(module, found, ranks)
    of_layers = [(stage,) for stage, count in enumerate(counts) for _ in range(count)]
    names = [f"rank {each}" for each in range(ranks)]
    ownership = Ownership(module, found, of_layers, rank, (ranks - 1,), names)
    ownership.release_layers()
    materialize(module)
    return ownership


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """A module from the seed, and the generator's state after it."""
    torch.manual_seed(SEED)
    module = make()
    return module, torch.get_rng_state()


def assert_built_alike(make: Callable[[], nn.Module], layers: Layers = None, ranks: Sequence[int] = (1, 2, 4)) -> None:
    """Every parameter and buffer of every rank is, bit by bit, that of a plain construction; and every one is held."""
    plain, after = built(make)
    expected = all_tensors(plain)
    for number in ranks:
        seen: set[str] = set()
        for rank in range(number):
            with deferred_init():
                module, state = built(make)
            assert torch.equal(state, after), "the generator"
            assert any(map(is_deferred, all_tensors(module).values())), "nothing is large enough to be recorded"
            ownership = divided(module, rank, number, layers)
            found = all_tensors(module)
            assert list(found) == list(expected)
            for name, tensor in found.items():
                assert_alike(name, tensor, expected[name])
            seen |= {name for name, tensor in found.items() if not isinstance(tensor, AbsentTensor)}
            held = {name for name, tensor in named_tensors(module) if not isinstance(tensor, AbsentTensor)}
            assert held == {name for name, _ in named_tensors(module) if ownership.holds(name)}
            assert ties(found) == ties(expected)
        assert seen == set(expected)


def assert_alike(name: str, tensor: Tensor, known: Tensor) -> None:
    assert (tensor.shape, tensor.dtype) == (known.shape, known.dtype), name
    assert (tensor.requires_grad, tensor.device) == (known.requires_grad, known.device), name
    if not isinstance(tensor, AbsentTensor):
        assert type(tensor) is type(known), name
        assert tensor.stride() == known.stride(), name
        one, other = (each.detach().reshape(-1).view(torch.uint8) for each in (tensor, known))  # NaN is NaN
        assert torch.equal(one, other), name


def ties(tensors: dict[str, Tensor]) -> list[int]:
    """For each tensor the place of the first one that is the same."""
    known = list(map(id, tensors.values()))
    return [known.index(each) for each in known]
