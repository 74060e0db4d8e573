"""Layers are modules that are called once, in the order of the calls."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_pipe.errors import PartitionError
from lightning_pipe.partition import find_layers
from lightning_pipe.partition.calls import Call
from lightning_pipe.partition.choice import Chosen, choose, line, serves


class Net(nn.Module):
    """Modules by name; those with a dot lie within others."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                parent = getattr(parent, part)
            parent.add_module(last, nn.Linear(2, 2))


def names(chosen: Chosen) -> list[str]:
    return [name for name, _ in chosen.layers]


def calls(*named: str, work: float = 1.0) -> list[Call]:
    return [Call(name, work) for name in named]


def test_order_is_that_of_the_calls() -> None:
    assert names(choose(Net("a", "b", "c"), calls("c", "a", "b"), 2)) == ["c", "a", "b"]


def test_large_modules_are_opened_and_small_ones_stay_closed() -> None:
    net = Net("big", "big.a", "big.b", "small", "small.a", "small.b")
    step = [Call("big", 20.0, calls("big.a", "big.b", work=10)), Call("small", 2.0, calls("small.a", "small.b"))]
    assert names(choose(net, step, 2)) == ["big.a", "big.b", "small"]
    assert names(choose(net, step, 4)) == ["big.a", "big.b", "small.a", "small.b"], "more stages than that"


def test_the_whole_module_is_always_opened() -> None:
    assert names(choose(Net("a", "b"), [Call("", 2.0, calls("a", "b"))], 1)) == ["a", "b"]


def test_a_loop_stays_one_layer() -> None:
    """What a module calls in turns is not taken apart, however large it is."""
    net = Net("cell", "decoder", "decoder.a", "decoder.b")
    step = [*calls("cell"), Call("decoder", 30.0, 3 * calls("decoder.a", "decoder.b", work=5))]
    assert names(choose(net, step, 2)) == ["cell", "decoder"]


def test_experts_stay_in_one_layer() -> None:
    """Which of them are called depends on the data."""
    net = Net("a", "moe", "moe.gate")
    net.moe.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    inner = [*calls("moe.gate"), *calls("moe.experts.0", "moe.experts.2", work=9)]
    assert names(choose(net, [*calls("a"), Call("moe", 20.0, inner)], 2)) == ["a", "moe"]
    inner = [*calls("moe.gate"), *calls("moe.experts.0", "moe.experts.1", "moe.experts.2", work=9)]
    assert len(choose(net, [*calls("a"), Call("moe", 28.0, inner)], 2).layers) == 5


def test_elements_that_a_step_leaves_out_are_layers_beside_the_others() -> None:
    """Another batch may call them: the head of its task, a block that is dropped."""
    net = Net("a")
    net.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    net.heads = nn.ModuleDict({name: nn.Linear(2, 2) for name in "xyz"})
    net.spare = nn.ModuleList([nn.Linear(2, 2)])
    chosen = choose(net, calls("a", "blocks.0", "blocks.2", "heads.y"), 2)
    assert names(chosen) == ["a", "blocks.0", "blocks.1", "blocks.2", "heads.x", "heads.y", "heads.z"]
    assert chosen.work == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert chosen.passes([4, 3]) == 1


def test_several_calls_in_a_row_are_one_layer() -> None:
    assert names(choose(Net("a", "b"), calls("a", "b", "b", "b"), 2)) == ["a", "b"]


def test_what_is_shared_and_does_little_is_no_layer() -> None:
    step = [Call(name, 0.1 if name == "norm" else 5.0) for name in ("a", "norm", "b", "norm", "c")]
    assert names(choose(Net("norm", "a", "b", "c"), step, 3)) == ["a", "b", "c"]


def test_a_part_that_is_called_by_itself_opens_what_it_is_part_of() -> None:
    net = Net("model", "model.table", "model.body", "head")
    step = [*calls("model.table"), Call("model", 2.0, calls("model.body")), *calls("head")]
    assert names(choose(net, step, 2)) == ["model.table", "model.body", "head"]


def test_a_step_may_come_back() -> None:
    net, step = Net("a", "b", "c"), calls("a", "b", "a", "b", "c", "c")
    twice = choose(net, step, 2, passes=4)
    assert (names(twice), twice.passes([1, 2]), twice.passes([2, 1])) == (["a", "b", "c"], 2, 1)
    assert twice.opened == []
    with pytest.raises(PartitionError, match=r"use schedule='1f1b', .* with layers=\['a', 'b', 'c'\] and passes=2"):
        choose(net, step, 2)


def test_too_few_layers_tell_what_was_called() -> None:
    with pytest.raises(
        PartitionError, match=r"2 layers for 3 stages.* Called were: a, b \(2 times\)\. .*\nHint: Use 2 st"
    ):
        choose(Net("a", "b"), calls("a", "b", "b"), 3)


def test_modules_on_one_stage_are_closed_again() -> None:
    net = Net("m", "m.a", "m.b", "m.b.x", "m.b.y", "n", "n.a", "n.b")
    step = [
        Call("m", 30.0, [*calls("m.a", work=10), Call("m.b", 20.0, calls("m.b.x", "m.b.y", work=10))]),
        Call("n", 20.0, calls("n.a", "n.b", work=10)),
    ]
    chosen = choose(net, step, 2)
    assert names(chosen) == ["m.a", "m.b.x", "m.b.y", "n.a", "n.b"]
    for counts, closed, numbers in (
        ([3, 2], ["m", "n"], [1, 1]),
        ([2, 3], ["m.a", "m.b.x", "m.b.y", "n"], [2, 2]),
        ([1, 4], ["m.a", "m.b", "n"], [1, 2]),
    ):
        layers, found = chosen.closed(counts)
        assert ([name for name, _ in layers], found) == (closed, numbers)


def test_a_module_around_a_layer_that_it_does_not_call_stays_open() -> None:
    net = Net("model", "model.table", "model.body", "head")
    step = [*calls("model.table"), Call("model", 1.0, calls("model.body")), *calls("head")]
    layers, numbers = choose(net, step, 2).closed([2, 1])
    assert ([name for name, _ in layers], numbers) == (["model.table", "model.body", "head"], [2, 1])


def test_a_clear_sequence_serves_if_it_does_the_work() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers = find_layers(net)
    assert serves(layers, calls("0", "1", "2", work=5), 2)
    assert not serves(layers, calls("0", "2", "1", work=5), 2)
    assert not serves(layers, [*calls("0", "1", "2"), Call("outside", 1.0)], 2), "a quarter of the work is elsewhere"
    assert not serves(layers, calls("0", "1", "2"), 4)


def test_the_line_to_paste_leads_to_the_layers() -> None:
    net = Net("m", "m.a", "m.b", "head")
    net.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for wanted, counts, flat in (
        (["m.a", "m.b", "head"], [2, 1], [2, 1]),
        (["m.b", "m.a"], [1, 1], [1, 1]),
        (["m", "body", "head"], [1, 2], [1, 5]),
    ):
        layers = [(name, net.get_submodule(name)) for name in wanted]
        options = eval(f"dict({line(net, layers, counts)})")
        assert options["balance"] == flat
        found = find_layers(net, options["layers"])
        assert sum(flat) == len(found)
        names = [name for name, _ in found]
        assert names == wanted or names == ["m", "body.0", "body.1", "body.2.0", "body.2.1", "head"]
    assert line(net, [(name, net.get_submodule(name)) for name in ("m.a", "m.b", "head")]) == "layers=['m.*', 'head']"
    assert line(net, [("m", net.m)]) == "layers='m'"
