"""Who holds which parameter, before and after the first batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError, PartitionError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.partition import find_layers
from tests.support.user_modules import WithShared

NAMES = ["rank 0", "rank 1"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 1)


def divided(rank: int, net: Net | None = None, layer_ranks: tuple[int, int] = (0, 1)) -> tuple[Ownership, Net]:
    net = net or Net()
    ranks = [(rank,) for rank in layer_ranks]
    return Ownership(net, find_layers(net, "layers"), ranks, rank, (1,), NAMES), net


def learned(rank: int) -> tuple[Ownership, Net]:
    ownership, net = divided(rank)
    ownership.release_layers()
    ownership.learn_users([{"embed.weight", "embed.bias", "embed."}, {"head.weight", "head.bias", "head."}])
    return ownership, net


class Tied(nn.Module):
    """Three layers, of which the first and the last share a weight; a scale, a norm and a table outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=number == 1) for number in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.scale, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)
        self.also = nn.Module()
        self.also.weight = self.layers[1].weight


def mapped(module: nn.Module) -> Ownership:
    layers = [(f"layers.{number}", module.get_submodule(f"layers.{number}")) for number in range(3)]
    return Ownership(module, layers, [(0,), (1,), (2,)], 0, (2,), ["rank 0", "rank 1", "rank 2"])


def test_layers_belong_to_the_ranks_of_their_stages() -> None:
    ownership = mapped(Tied())
    assert ownership.owners("layers.1.bias") == (1,)
    assert ownership.owners("layers.0.weight") == ownership.owners("layers.2.weight") == (0, 2)
    assert ownership.in_layers_alone("layers.2.weight")


def test_what_lies_outside_belongs_to_everyone_until_its_users_are_known() -> None:
    ownership = mapped(Tied())
    outside = ("scale", "unused", "norm.weight", "norm.running_mean")
    assert {ownership.owners(name) for name in outside} == {(0, 1, 2)}
    ownership.learn_users([{"scale"}, {"scale", "norm."}, set()])
    assert [ownership.owners(name) for name in outside] == [(0, 1), (2,), (2,), (1,)]


def test_a_parameter_of_a_layer_and_a_module_outside_belongs_to_both() -> None:
    module = Tied()
    ownership = mapped(module)
    name = ownership.name_of(module.layers[1].weight)
    assert name is not None
    assert ownership.needed(name)
    assert not ownership.in_layers_alone(name)
    assert ownership.owners(name) == (0, 1, 2)
    ownership.learn_users([{name}, set(), set()])
    assert ownership.owners("also.weight") == ownership.owners("layers.1.weight") == (0, 1)


def test_new_tensors_belong_to_the_ranks_with_the_loss_or_to_those_that_have_them() -> None:
    module = Tied()
    ownership = mapped(module)
    module.average = nn.Linear(2, 2, bias=False)
    assert ownership.agree_on_lost(lambda mine: [mine] * 3) == []
    assert ownership.owners("average.weight") == (2,)
    none: tuple[set[str], set[str]] = (set(), set())
    lost = set[str](), {"average.weight"}
    having = iter([[none, none, lost], [["average.weight"], ["average.weight"], []]])
    assert ownership.agree_on_lost(lambda _: next(having)) == []
    assert ownership.owners("average.weight") == (0, 1)
    having = iter([[none, lost, none], [[], [], []]])
    assert ownership.agree_on_lost(lambda _: next(having)) == ["average.weight"]
    ownership.restore(lambda name, owners, tensor: tensor.detach())
    assert ownership.owners("average.weight") == ownership.owners("layers.1.bias") == (0, 1, 2)
    module.late = nn.Linear(2, 2, bias=False)
    with pytest.raises(CutError, match=r"'late.weight' is on some ranks alone"):
        ownership.agree_on_lost(lambda mine: [none, mine, mine])


def test_what_may_have_memory_in_common() -> None:
    net = Net()
    mask = torch.ones(3)
    for number, layer in enumerate(net.layers):
        layer.register_buffer("mask", mask[: 2 + number])  # nothing changes them
        nn.utils.spectral_norm(layer)
    net.recurrent = nn.LSTM(2, 2)
    net.head.flat = torch.ones(6)
    net.head.weight.data, net.head.bias.data = net.head.flat[:2].view(1, 2), net.head.flat[2:3]
    with pytest.raises(PartitionError, match=r"'head.(weight|bias)' and 'head.flat' are different tensors"):
        divided(0, net)[0].release_layers()
    del net.head.flat  # two pieces of one memory
    divided(0, net)[0].release_layers()


def test_every_tensor_changes_its_type_in_nested_and_shared_modules() -> None:
    net, shared = Net(), nn.Linear(2, 2)
    net.layers = nn.ModuleList(WithShared(shared, nn.Linear(2, 2)) for _ in range(2))
    ownership, _ = divided(0, net)
    ownership.release_layers()
    before = [*net.parameters()]
    net.double()
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}
    assert net.layers[0](torch.ones(1, 2).double()).dtype == torch.float64
    assert is_absent(net.layers[1].own.weight)


def test_recurrent_layers_of_other_ranks_change_their_type_and_come_back() -> None:
    """Torch refers to their weights weakly again whenever it has changed them."""
    net = Net()
    net.layers[1] = nn.LSTM(2, 2)
    ownership, _ = divided(0, net)
    ownership.release_layers()
    before = [*net.parameters()]
    net.double()
    assert all(is_absent(parameter) for parameter in net.layers[1].parameters())
    ownership.restore(lambda name, owners, tensor: torch.ones(tensor.shape, dtype=tensor.dtype))
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    assert net.layers[1](torch.ones(1, 2).double())[0].dtype == torch.float64


def test_after_the_first_batch_users_alone_hold_what_is_outside() -> None:
    ownership, net = learned(0)
    assert ownership.owners("embed.weight") == (0,)
    assert ownership.owners("head.weight") == (1,)
    assert is_absent(net.head.weight)
    assert ownership.counted("embed.weight")
    assert not ownership.counted("head.weight")
    assert ownership.holds_all(net.embed.parameters())
    assert ownership.ranks_with([net.embed.weight, net.head.weight]) == ()
    assert ownership.ranks_with([torch.ones(1)]) is None


def test_no_new_tensor_is_taken_for_a_freed_one() -> None:
    ownership, _ = learned(0)
    new = [nn.Parameter(torch.ones(1)) for _ in range(1000)]  # some where Python had the freed objects
    assert [ownership.known_name(tensor) for tensor in new] == [None] * 1000
    assert ownership.ranks_with(new) is None


def test_the_use_of_a_value_that_another_rank_holds_raises() -> None:
    ownership, net = learned(0)
    ownership.use(net.embed.weight)
    with pytest.raises(CutError, match=r"'layers\.1\.weight' is used on rank 0, but held by rank 1\."):
        ownership.use(net.layers[1].weight)
    with pytest.raises(CutError, match="in the first training batch nobody else used it"):
        ownership.use(net.head.weight)


def test_data_without_values_is_refused_where_a_rank_computes_with_it() -> None:
    ownership, net = learned(0)
    ownership.rank_names = ["rank 7", "rank 6"]  # Lightning's numbers, which errors tell
    ownership.check_data()
    net.layers[0].weight.data = 0.9 * net.layers[0].weight.data + 0.1 * net.layers[1].weight.data
    with pytest.raises(CutError, match=r"'layers\.0\.weight' is used on rank 7 and follows parameters of other ranks"):
        ownership.check_data()


def test_every_rank_gets_every_value_again() -> None:
    parts = [learned(0), learned(1)]
    true = {
        name: torch.rand_like(parts[owner][1].get_parameter(name))
        for owner, name in ((0, "embed.weight"), (1, "head.weight"), (1, "layers.1.weight"), (0, "layers.0.weight"))
    }
    asked: list[list[str]] = []
    for ownership, net in parts:
        asked.append([])

        def fetch(name: str, owners: tuple[int, ...], local: Tensor, asked: list[str] = asked[-1]) -> Tensor:
            asked.append(name)
            return true.get(name, torch.zeros(local.shape))

        ownership.restore(fetch)
        assert not any(map(is_absent, net.parameters()))
        assert ownership.owners("layers.0.weight") == (0, 1)
    assert asked[0] == asked[1], "fetching is collective"
    assert torch.equal(parts[0][1].head.weight, true["head.weight"])
    assert torch.equal(parts[1][1].layers[0].weight, true["layers.0.weight"])


def test_a_division_that_needs_what_is_gone_raises() -> None:
    _, net = learned(0)
    ownership, _ = divided(0, net, layer_ranks=(1, 0))
    with pytest.raises(PartitionError, match=r"is to compute with 'layers\.1\.weight', and has no value of it"):
        ownership.release_layers()


def test_what_a_held_graph_refers_to_cannot_be_left_to_others() -> None:
    ownership, net = divided(0)
    output = net.layers[1](net.embed(torch.ones(1, 2)))
    with pytest.raises(CutError, match=r"'layers\.1\.weight' \(2, 2\) cannot be left to other ranks.*\n.*del output"):
        ownership.release_layers()
    del output
    with torch.no_grad():
        output = net.layers[1](net.embed(torch.ones(1, 2)))
    ownership.release_layers()
    assert is_absent(net.layers[1].weight)
    assert output.shape == (1, 2)
