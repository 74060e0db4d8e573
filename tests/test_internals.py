"""Every private name of torch, Lightning and torchmetrics is in the registers, exists, and is used."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_pipe import lightning_internals, torch_internals
from lightning_pipe.errors import VersionError
from lightning_pipe.internals import Names, check, exists

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("lightning_pipe", "recipes") for path in (ROOT / folder).rglob("*.py"))
REGISTERS = ("torch_internals.py", "lightning_internals.py")
NAMES: Names = {**torch_internals.NAMES, **torch_internals.LATE, **lightning_internals.NAMES}
REGISTERED = {name for names in NAMES.values() for name in names}
OTHERS = {
    "_exit": "os, documented",
    "_current_frames": "sys, documented",
    "_getframe": "sys, documented",
    "_fields": "named tuples, documented",
    "_make": "named tuples, documented",
    "_replace": "named tuples, documented",
    "_fingerprint": "datasets, in the recipes",
    "_catalog": "gettext, in the recipes",
    "_pipe_number": "ours, on tensors",
    "_pipe_lineage": "ours, on tensors",
    "_pipe_values": "ours, on tensors",
    "_namespaces": "ours, on layers with skip connections",
    "_source": "ours, on a loader",
}

ASKING = {"getattr", "hasattr", "setattr", "replaced", "get", "pop", "_around", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def called(function: ast.expr) -> str:
    """The last part of the name of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def private_uses(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Private attributes that a module asks objects for, with ``vars`` and `replaced` too, and private imports."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("lightning_pipe", "recipes")):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
            yield from ((node.lineno, part) for part in (node.module or "").split(".") if is_private(part))
        elif isinstance(node, ast.Call) and called(node.func) in ASKING:
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from ((node.lineno, name) for name in names if is_private(name))


@functools.cache
def sources() -> dict[Path, list[ast.AST]]:
    """All nodes of each module's tree: to walk takes longer than to look at them."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in SOURCES}


def test_every_private_name_is_in_the_registers() -> None:
    own = {name for nodes in sources().values() for name in defined(nodes)}
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, nodes in sources().items()
        if path.name not in REGISTERS
        for line, name in private_uses(nodes)
        if name not in REGISTERED and name not in OTHERS and name not in own
    ]
    assert found == [], "\n".join(found)


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """The private names that a module of ours defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def test_every_private_name_of_the_registers_is_used() -> None:
    used = {name for path, nodes in sources().items() for node in nodes for name in mentioned(node, path)}
    assert sorted(REGISTERED - used) == []


def mentioned(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.alias):
        yield node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name not in REGISTERS:
        yield node.value
        yield from node.value.split(".")


def test_no_private_name_is_imported_elsewhere() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path, nodes in sources().items()
        if path.name not in REGISTERS
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES
        for alias in node.names
        if is_private(alias.name) or any(map(is_private, (node.module or "").split(".")))
    ]
    assert found == [], "\n".join(found)


LIBRARIES = ("torch", "lightning", "lightning_utilities", "torchmetrics", "transformers")


@pytest.mark.parametrize("owner", sorted(NAMES))
def test_every_private_name_exists(owner: str) -> None:
    assert [name for name in NAMES[owner] if not exists(owner, name)] == []


def test_what_is_missing_is_named_with_the_versions() -> None:
    names = {"torch.Tensor": {"_version": "", "_gone": ""}, "torch.gone": {"_name": ""}}
    with pytest.raises(VersionError, match=r"torch\.Tensor\._gone, torch\.gone\._name, which torch 2\.\d+") as raised:
        check({"torch": ">=2.10,<2.16"}, names)
    assert raised.value.hint is not None
    assert "torch>=2.10,<2.16" in raised.value.hint
    assert isinstance(raised.value, ImportError)


def test_names_that_objects_get_from_methods_are_found() -> None:
    assert exists("lightning.pytorch.trainer.trainer.Trainer", "_signal_connector")
    assert not exists("lightning.pytorch.trainer.trainer.Trainer", "_signal_connectors")
    assert not exists("lightning.pytorch.trainers", "_signal_connector")


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for library, versions in {**torch_internals.VERSIONS, **lightning_internals.VERSIONS}.items():
        assert f"{library}{versions}" in asked


def test_parameters_have_the_names_and_the_order_that_torch_gives_them() -> None:
    """A module inside itself, one used twice, a weight used twice, and entries that are None."""
    shared, net = nn.Linear(2, 2), nn.Module()
    net.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2, bias=False), shared), shared, nn.Linear(2, 2)])
    net.blocks[2].weight = net.blocks[0][0].weight
    net.blocks[0].whole = net
    net.register_module("none", None)
    net.scale = nn.Parameter(torch.ones(1))
    expected = [(name, id(parameter)) for name, parameter in net.named_parameters()]
    assert [(name, id(parameter)) for name, parameter in torch_internals.named_parameters(net)] == expected
    assert len(expected) == 5
