"""Which modules are taken for the layer sequence, and when that is not clear."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import PartitionError
from lightning_pipe.partition import divide, find_layers, known_layers, parameter_count


def linear(n: int = 1) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(n)]


def names(module: nn.Module, layers: str | list[str] | None = None) -> list[str]:
    found = find_layers(module, layers)
    for name, layer in found:
        assert module.get_submodule(name) is layer
    return [name for name, _ in found]


class Block(nn.Module):
    """A block with a Sequential inside, which must not win over the list of blocks."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Body(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class OwnForward(nn.Sequential):
    """Does more than calling its children: it is a block, not a part of the sequence around it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_sequential_itself() -> None:
    assert names(nn.Sequential(*linear(3))) == ["0", "1", "2"]


def test_nested_sequentials_are_flattened_at_any_depth() -> None:
    net = nn.Sequential(nn.Sequential(*linear(2), nn.Sequential(*linear(2), nn.Sequential())), nn.Linear(4, 4))
    assert names(Holder(net=net)) == ["net.0.0", "net.0.1", "net.0.2.0", "net.0.2.1", "net.1"]


def test_a_sequential_with_its_own_forward_is_one_layer() -> None:
    assert names(nn.Sequential(OwnForward(*linear(2)), *linear(3))) == ["0", "1", "2", "3"]
    assert names(OwnForward(*linear(2))) == ["0", "1"]


def test_a_compiled_sequential_is_one_layer() -> None:
    inner = nn.Sequential(*linear(2))
    inner.compile(backend="eager")
    assert names(nn.Sequential(inner, *linear(1))) == ["0", "1"]


def test_code_compiled_as_a_whole_cannot_be_cut() -> None:
    compiled = torch.compile(nn.Sequential(*linear(3)), backend="eager")
    with pytest.raises(PartitionError, match="Compile the layers one by one"):
        find_layers(Holder(net=compiled), None, 2)
    with pytest.raises(PartitionError, match=r"'net._orig_mod.0' lies inside 'net'(?s:.*)one by one"):
        find_layers(Holder(net=compiled), "net._orig_mod")
    whole = nn.Sequential(*linear(3))
    whole.compile(backend="eager")
    with pytest.raises(PartitionError, match="compiled as a whole"):
        find_layers(Holder(net=whole), "net")
    for layer in (blocks := nn.Sequential(*linear(3))):
        layer.compile(backend="eager")
    assert names(Holder(net=blocks)) == ["net.0", "net.1", "net.2"]


def test_containers_that_cannot_be_called_are_flattened() -> None:
    pairs = nn.ModuleList(nn.ModuleList(linear(2)) for _ in range(2))
    assert names(Holder(layers=pairs)) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    pairs = nn.ModuleList(nn.ModuleDict({"attention": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)}) for _ in range(2))
    assert names(Holder(layers=pairs))[:2] == ["layers.0.attention", "layers.0.mlp"]


def test_a_list_of_blocks_wins_over_the_sequential_inside_a_block() -> None:
    assert names(Body(3)) == ["blocks.0", "blocks.1", "blocks.2"]
    # also where one block alone holds most of the parameters
    assert names(Holder(blocks=nn.ModuleList([Block(2), Block(40)]))) == ["blocks.0", "blocks.1"]


def test_the_blocks_win_over_the_sequential_around_them() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Body(6), nn.Linear(4, 4))
    assert names(net) == [f"1.blocks.{i}" for i in range(6)]


def test_module_dict_of_parts_is_no_sequence() -> None:
    parts = nn.ModuleDict({"embedding": nn.Embedding(4, 4), "h": nn.ModuleList(linear(4)), "norm": nn.LayerNorm(4)})
    assert names(Holder(transformer=parts)) == [f"transformer.h.{i}" for i in range(4)]


def test_without_a_clear_sequence_the_modules_are_guessed_in_the_order_of_registration() -> None:
    model = Holder(encoder=Body(4), decoder=Body(6), head=nn.Linear(4, 1))
    assert known_layers(model, None) == []
    assert names(model) == [
        *(f"encoder.blocks.{i}" for i in range(4)),
        *(f"decoder.blocks.{i}" for i in range(6)),
        "head",
    ]
    assert names(model, ["encoder.blocks", "decoder.blocks"])[3:5] == ["encoder.blocks.3", "decoder.blocks.0"]
    little = Holder(embedding=nn.Embedding(1000, 4), blocks=nn.ModuleList(linear(3)))
    assert known_layers(little, None) == []
    assert names(little) == ["embedding", "blocks.0", "blocks.1", "blocks.2"]


def test_a_guess_has_as_many_layers_as_stages() -> None:
    model = Holder(first=Body(2), second=Body(2))
    assert len(find_layers(model, None, 4)) >= 4
    with pytest.raises(PartitionError, match=r"does not hold 99 layers(?s:.*)Use 8 stages"):
        find_layers(model, None, 99)


def test_a_second_head_is_no_rival_while_small() -> None:
    small = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    assert names(Holder(net=nn.Sequential(*linear(4)), head=small)) == ["net.0", "net.1", "net.2", "net.3"]
    assert known_layers(Holder(net=nn.Sequential(*linear(4)), head=nn.Sequential(*linear(2))), None) == []


def test_a_sequence_that_shares_its_parameters_is_no_rival() -> None:
    blocks = linear(4)
    first = nn.ModuleList(blocks)
    assert names(Holder(one=first, two=nn.Sequential(*blocks))) == [f"one.{i}" for i in range(4)]


@pytest.mark.parametrize("net", [nn.Sequential(), nn.Module(), nn.Sequential(nn.ReLU(), nn.Tanh())])
def test_nothing_found(net: nn.Module) -> None:
    with pytest.raises(PartitionError, match="does not hold 1 layer with parameters"):
        find_layers(net)


def test_wildcards() -> None:
    stages = nn.ModuleList(Holder(layers=nn.Sequential(*linear(2)), pool=nn.ReLU()) for _ in range(11))
    model = Holder(resnet=Holder(stages=stages))
    found = names(model, "resnet.stages.*.layers")
    assert found[:3] == ["resnet.stages.0.layers.0", "resnet.stages.0.layers.1", "resnet.stages.1.layers.0"]
    assert found[-1] == "resnet.stages.10.layers.1"  # registered order, not that of the letters
    assert len(names(model, "resnet.stages.*")) == 11
    assert len(names(model, "resnet.stages.*.*")) == 33
    assert len(names(model, "res*.stages.[01].layers")) == 4


def test_a_path_may_name_one_layer() -> None:
    model = Holder(stem=nn.Linear(4, 4), body=nn.Sequential(*linear(2)), head=nn.Linear(4, 4))
    assert names(model, ["stem", "body", "head"]) == ["stem", "body.0", "body.1", "head"]
    assert names(model, ("head", "stem")) == ["head", "stem"]  # type: ignore[arg-type]
    assert names(nn.Sequential(*linear(2)), "") == ["0", "1"]


@pytest.mark.parametrize("wrong", ["encodr.blocks", "encoder.block", "encoder.blocks.4", "encoder.*.layers"])
def test_a_path_that_leads_nowhere_names_the_nearest(wrong: str) -> None:
    with pytest.raises(PartitionError, match=rf"(?s)no module {wrong!r}.*encoder\.blocks".replace("*.l", r"\*.l")):
        find_layers(Holder(encoder=Body(4), head=nn.Linear(4, 4)), wrong)


def test_a_path_like_nothing_lists_what_there_is() -> None:
    with pytest.raises(PartitionError, match="It has 0, 1"):
        find_layers(nn.Sequential(*linear(2)), "transformer.h")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["body", "body"], "'body.0' twice"),
        (["body", "body.0"], "'body.0' twice"),
        (["part", "part.blocks"], "'part' and, inside it, 'part.blocks.0'"),
        ([], "names no layer"),
        (["empty"], "'empty' is empty"),
    ],
)
def test_wrong_lists_of_paths(paths: list[str], message: str) -> None:
    model = Holder(body=nn.Sequential(*linear(2)), part=Body(2), empty=nn.ModuleList())
    with pytest.raises(PartitionError, match=message):
        find_layers(model, paths)


def test_a_module_used_several_times_is_no_layer() -> None:
    shared = nn.ReLU()
    assert names(nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))) == ["0", "2", "4"]
    block = nn.Linear(4, 4)
    with pytest.raises(PartitionError, match=r"occur several times \(Linear\)"):
        find_layers(nn.Sequential(block, block, block), "")
    assert known_layers(nn.Sequential(block, block, block), None) == []


def test_names_are_those_of_named_parameters() -> None:
    model = Holder(inner=Body(3))
    model.alias = model.inner.blocks
    assert names(model, "alias") == ["inner.blocks.0", "inner.blocks.1", "inner.blocks.2"]


def test_layers_that_share_a_parameter_are_layers() -> None:
    net = nn.Sequential(*linear(3))
    net[2].weight = net[0].weight
    assert names(net) == ["0", "1", "2"]
    assert parameter_count([net]) == 2 * 16 + 3 * 4


def test_none_children_and_lazy_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4), nn.Linear(4, 4))
    net.register_module("3", None)
    assert names(net) == ["0", "1", "2"]
    assert parameter_count([net]) == 40


def test_meta_modules_are_found_like_others() -> None:
    with torch.device("meta"):
        assert names(Body(3)) == ["blocks.0", "blocks.1", "blocks.2"]


def followed(module: nn.Module, error: PartitionError) -> int:
    """How many layers there are if the hint is followed."""
    found = re.search(r"layers=(\[.*?\]|'.*?'|\".*?\")", str(error.hint))
    assert found is not None
    return len(find_layers(module, ast.literal_eval(found[1])))


@pytest.mark.parametrize("wrong", ["layer", "net", "heads", "encoder.layer.0", "modle.blocks"])
def test_hints_for_wrong_names_can_be_followed(wrong: str) -> None:
    module = Holder(net=Holder(layer=Body(3), layers=nn.Linear(4, 4)), head=nn.Linear(4, 4), heads1=nn.Linear(4, 4))
    with pytest.raises(PartitionError) as caught:
        divide(module, find_layers(module, wrong), 2)
    if "layers=" in str(caught.value.hint):
        assert followed(module, caught.value) > 1


def test_one_layer_alone_cannot_be_divided() -> None:
    module = Holder(net=Body(3), head=nn.Linear(4, 4))
    with pytest.raises(PartitionError) as caught:
        divide(module, find_layers(module, "head"), 3)
    assert "stages=" not in str(caught.value.hint)
    assert followed(module, caught.value) == 3


def test_a_single_module_is_told_so() -> None:
    module = Holder(net=nn.Linear(4, 4))
    with pytest.raises(PartitionError, match=r"1 layer \(net\) cannot fill 2 stages(?s:.*)Train it on one device"):
        divide(module, find_layers(module), 2)
