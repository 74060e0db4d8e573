"""The structure of the package, measured from its source: rooms, arrows between them, circles, and counts.

``python -m tests.support.structure`` prints it. A *room* is a folder of the package, or one of the files at its top. An
*arrow* is an import, wherever it stands: at the top of a module or inside a function. Imports for type checkers alone
are left out, since nothing runs because of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_pipe"

LEVELS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("__init__", "callbacks"),
    ("trainer",),
    ("plain",),
    ("profiling",),
    ("batches",),
    ("planning", "engine"),
    ("sharding",),
    ("parameters",),
    ("intercept",),
    ("transport",),
    ("partition", "simulate"),
    ("schedules", "skip", "construction"),
    ("config", "tensor_spec", "lightning_internals", "torch_internals", "warn_once", "local_parts"),
    ("text", "internals", "patches", "distributions"),
    ("errors", "version"),
)
"""The rooms from top to bottom. Arrows lead downwards: a room may import those of the levels below its own."""


class Structure:
    """The modules of the package and what they import.

    Args:
        root: the folder that holds the package.
    """

    def __init__(self, root: Path = ROOT) -> None:
        paths = sorted((root / PACKAGE).rglob("*.py"))
        self.sources = {_module(path.relative_to(root)): path.read_text() for path in paths}
        self.trees = {name: ast.parse(source) for name, source in self.sources.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """For every module the modules of the package that it imports."""
        return {name: set(self._imported(name, tree)) - {name} for name, tree in self.trees.items()}

    @cached_property
    def arrows(self) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """For every pair of rooms the imports that lead from the first to the second."""
        arrows: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for name, imported in self.imports.items():
            for other in imported:
                if room(name) != room(other):
                    arrows.setdefault((room(name), room(other)), set()).add((name, other))
        return arrows

    def upward(self) -> list[str]:
        """The imports that do not lead downwards."""
        level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
        return sorted(
            f"{name} imports {other}"
            for (source, target), edges in self.arrows.items()
            if level[source] >= level[target]
            for name, other in edges
        )

    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other, directly or over others."""
        reached = {name: _reachable(self.imports, name) for name in self.imports}
        groups = {
            frozenset({name} | {other for other in reached[name] if name in reached.get(other, ())})
            for name in reached
            if name in reached[name]
        }
        return sorted(sorted(group) for group in groups)

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """For every module all nodes of its tree: to walk takes longer than to look at them."""
        return {name: list(ast.walk(tree)) for name, tree in self.trees.items()}

    @cached_property
    def attributes(self) -> dict[str, int]:
        """For every class the number of attributes that its methods assign to ``self``."""
        return {
            f"{name}.{node.name}": len(set(_self_assigned(node)))
            for name, nodes in self.nodes.items()
            for node in nodes
            if isinstance(node, ast.ClassDef)
        }

    def lines(self) -> dict[str, int]:
        """For every room its lines."""
        found: dict[str, int] = {}
        for name, source in self.sources.items():
            found[room(name)] = found.get(room(name), 0) + source.count("\n")
        return found

    def classes(self) -> int:
        """How many classes there are."""
        return len(self.attributes)

    def _imported(self, name: str, tree: ast.Module) -> Iterator[str]:
        for node in _running(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom) and node.module in self.trees:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in self.trees and alias.name not in self._defined(node.module) else node.module

    def _defined(self, package: str) -> set[str]:
        """The names that a package's own file imports from modules: ``schedules.lower`` is a function, no module."""
        return {
            alias.asname or alias.name
            for node in self.trees[package].body
            if isinstance(node, ast.ImportFrom) and node.module != package
            for alias in node.names
        }


def room(module: str) -> str:
    """The room of a module.

    Example:
        >>> room("lightning_pipe.transport.shared_memory.peer"), room("lightning_pipe.errors"), room("lightning_pipe")
        ('transport', 'errors', '__init__')
    """
    return [*module.split("."), "__init__"][1]


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _running(node)


def _reachable(imports: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in imports.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def _self_assigned(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            yield inner.attr


def private_names() -> int:
    """The private names of other packages in the registers, by owner and name."""
    from lightning_pipe import lightning_internals, torch_internals

    return sum(len(names) for register in (torch_internals, lightning_internals) for names in register.NAMES.values())


def patches(structure: Structure) -> int:
    """The places in the code that replace something of another package for a time."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("replaced", "Patch")
        for nodes in structure.nodes.values()
        for node in nodes
    )


def report(structure: Structure) -> str:
    """What the command prints."""
    lines = ["Rooms from top to bottom, with the rooms that they import (number of imports):"]
    rooms = sorted({room(name) for name in structure.imports})
    for level in LEVELS:
        for name in level:
            targets = sorted(
                (target, len(edges)) for (source, target), edges in structure.arrows.items() if source == name
            )
            files = sum(room(module) == name for module in structure.imports)
            if name in rooms:
                lines.append(f"  {name} ({files} files): " + ", ".join(f"{target} {n}" for target, n in targets))
    attributes = structure.attributes
    largest = max(attributes, key=lambda name: attributes[name])
    lines += [
        f"Arrows upwards: {len(structure.upward())}   circles: {len(structure.circles())}",
        *(f"  {text}" for text in structure.upward()),
        *(f"  {' <-> '.join(circle)}" for circle in structure.circles()),
        f"Rooms: {len(rooms)}   modules: {len(structure.sources)}   arrows: {len(structure.arrows)}   "
        f"lines: {sum(source.count(chr(10)) for source in structure.sources.values())}",
        f"Classes: {len(attributes)}   most attributes: {attributes[largest]} ({largest})",
        f"Private names of other packages: {private_names()}, all registered   patches: {patches(structure)}",
        f"README: {len((ROOT / 'README.md').read_text().split())} words",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Structure()))
