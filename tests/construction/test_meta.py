"""Modules on the meta device: they initialise themselves, by the run's seed and their names alone, or are an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import skip_init

from lightning_pipe.construction import check_all_set, initialise_meta, materialize, place_meta
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from tests.support.built import all_tensors, divided, ties

WIDE = 100


class Own(nn.Module):
    """A layer of the user's, with a buffer that is not in checkpoints; it writes to its weight in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDE, WIDE))
        self.scale = nn.Parameter(torch.empty(3))
        self.inner = nn.Linear(WIDE, 8)
        self.register_buffer("table", torch.arange(WIDE), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for half in self.weight.data.chunk(2):
            nn.init.orthogonal_(half)
        self.scale.data.copy_(torch.rand(3) + torch.randn(3))
        self.table.copy_(torch.arange(WIDE))
        nn.init.zeros_(self.inner.bias)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, WIDE, padding_idx=0)
        self.layers = nn.Sequential(*(Own() for _ in range(4)))
        self.norm = nn.BatchNorm1d(WIDE)
        self.recurrent = nn.LSTM(WIDE, WIDE)
        self.attention = nn.MultiheadAttention(WIDE, 4)
        self.head = nn.Linear(WIDE, 300, bias=False)
        self.head.weight = self.embed.weight


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def initialised(module: nn.Module, seed: int = 3) -> nn.Module:
    initialise_meta(module, seed)
    check_all_set(module)
    return module


@pytest.mark.parametrize(
    "make",
    [
        Model,
        pytest.param(lambda: hf.LlamaForCausalLM(LLAMA), marks=pytest.mark.slow),
        pytest.param(lambda: hf.GPT2LMHeadModel(GPT2), marks=pytest.mark.slow),
    ],
)
def test_values_depend_on_seed_and_name_alone(make: Callable[[], nn.Module]) -> None:
    layers = "layers" if make is Model else None
    plain, state = make(), torch.get_rng_state()
    whole = initialised(on_meta(make))
    materialize(whole)
    expected = all_tensors(whole)
    assert ties(all_tensors(plain)) == ties(expected)
    for rank in range(2):
        torch.manual_seed(rank)  # and nothing else
        torch.rand(rank)
        module = initialised(on_meta(make))
        divided(module, rank, 2, layers)
        for name, tensor in all_tensors(module).items():
            assert isinstance(tensor, AbsentTensor) or torch.equal(tensor, expected[name]), name
    torch.set_rng_state(state)
    other = initialised(on_meta(make), seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    materialize(other)
    for name, tensor in all_tensors(plain).items():
        found = expected[name]
        assert (type(found), found.shape, found.dtype) == (type(tensor), tensor.shape, tensor.dtype)
        assert not found.is_floating_point() or not found.isnan().any()
        if tensor.is_floating_point() and tensor.numel() > 1000 and float(tensor.detach().std()) > 0:
            torch.testing.assert_close(found.std(), tensor.std(), rtol=0.15, atol=0.001)
            assert not torch.equal(found, all_tensors(other)[name]) or not found.requires_grad, name
        else:
            assert found.requires_grad or torch.equal(found, tensor), name


LLAMA = hf.LlamaConfig(
    vocab_size=300, hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
)
GPT2 = hf.GPT2Config(n_layer=4, n_embd=96, n_head=4, vocab_size=300, n_positions=64)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDE, WIDE))

    def reset_parameters(self) -> None:
        for half in self.weight.data.chunk(2):
            half.normal_()


@pytest.mark.parametrize("make", [lambda: nn.Linear(WIDE, WIDE, bias=False), Halves])
def test_layers_of_other_ranks_take_no_memory(make: Callable[[], nn.Module]) -> None:
    size, ranks = 4 * WIDE * WIDE, 4
    module = on_meta(lambda: nn.ModuleList([make() for _ in range(4 * ranks)]))
    gc.collect()  # modules of earlier tests hold themselves: the profile would show the memory that they give back
    with torch.profiler.profile(profile_memory=True) as profile:
        initialised(module)
        divided(module, 1, ranks)
    assert sum(not isinstance(tensor, AbsentTensor) for tensor in all_tensors(module).values()) == 4
    events = profile.profiler.kineto_results.events()
    taken = [event.nbytes() for event in events if event.name() == "[memory]"]
    # nothing else is taken and given back, either: the allocator would keep some of it. States of generators are small
    assert [number for number in taken if abs(number) > size // 5] == [size] * 4


def test_modules_of_the_same_kind_differ() -> None:
    module = initialised(on_meta(Model))
    assert not torch.equal(module.layers[0].weight, module.layers[1].weight)
    assert torch.equal(module.layers[0].table, torch.arange(WIDE))
    materialize(module)
    assert not module.layers[0].inner.bias.any()
    assert not module.embed.weight[0].any()


def test_skip_init() -> None:
    module = nn.Sequential(skip_init(nn.Linear, WIDE, WIDE, device="meta"), nn.Linear(WIDE, WIDE))
    before = module[1].weight.detach().clone()
    initialised(module)
    materialize(module)
    assert float(module[0].weight.detach().std()) > 0
    assert torch.equal(module[1].weight, before)


class Forgets(nn.Module):
    """Leaves something out."""

    def __init__(self, reset: Callable[[Forgets], Any] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDE, WIDE))
        self.register_buffer("table", torch.arange(9), persistent=False)
        if reset is not None:
            self.reset_parameters = lambda: reset(self)


FORGOTTEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no method": (Forgets, "'0.weight', '0.table'"),
    "a buffer": (lambda: Forgets(lambda own: own.weight.data.normal_()), "'0.table'"),
    "a part": (lambda: Forgets(lambda own: (own.weight.data[1:].normal_(), own.table.zero_())), "'0.weight'"),
    "a list of parameters": (lambda: nn.ParameterList([torch.empty(WIDE)]), r"'0\.0'"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_nothing_initialises_is_named(what: str) -> None:
    make, names = FORGOTTEN[what]
    module = on_meta(lambda: nn.Sequential(make()))
    initialise_meta(module, 1)
    with pytest.raises(CutError, match=f"nothing initialises {names}, made on the meta device"):
        check_all_set(module)


def test_plain_attributes_are_named() -> None:
    module = nn.Linear(3, 3)
    module.mask = torch.empty(3, device="meta")
    initialise_meta(module, 1)
    with pytest.raises(CutError, match="nothing initialises 'mask'"):
        check_all_set(module)


def test_what_a_checkpoint_has_given_stays() -> None:
    state = {name: torch.full_like(tensor, 2) for name, tensor in nn.Linear(WIDE, WIDE).state_dict().items()}
    for names in (["weight"], ["weight", "bias"]):
        module = on_meta(lambda: nn.Linear(WIDE, WIDE))
        place_meta(module)
        module.load_state_dict({name: state[name] for name in names}, strict=False)
        initialised(module)
        materialize(module)
        assert (module.weight == 2).all()
        assert (module.bias == 2).all() == ("bias" in names)


def test_a_checkpoint_that_follows() -> None:
    module = on_meta(lambda: nn.Sequential(Forgets()))
    initialise_meta(module, 1)
    materialize(module)
    module.load_state_dict({"0.weight": torch.ones(WIDE, WIDE)})
    with pytest.raises(CutError, match=r"'0\.table'"):
        check_all_set(module)
    module[0].table.copy_(torch.arange(9))
    check_all_set(module)
    materialize(module)
    assert type(module[0].weight) is nn.Parameter
    assert (module[0].weight == 1).all()
