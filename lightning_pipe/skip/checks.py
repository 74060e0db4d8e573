"""Whether the stashes and pops that layers declare fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from lightning_pipe.skip.layers import SkippableMixin
from lightning_pipe.skip.store import SkipError, SkipKey


def verify_skippables(module: nn.Module) -> None:
    """Check that every stash in a sequence of layers has exactly one pop behind it.

    Args:
        module: an ``nn.Sequential`` or ``nn.ModuleList``; layers may be nested.

    Raises:
        SkipError: one line for every stash without pop, pop without stash, and name used twice.

    Example:
        >>> verify_skippables(nn.Sequential(nn.Linear(2, 2)))
    """
    verify((name, layer) for name, layer in module.named_modules() if isinstance(layer, SkippableMixin))


def verify(layers: Iterable[tuple[str, SkippableMixin]]) -> None:
    """Check layers with their names, in the order in which they run; see `verify_skippables`."""
    problems: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    for name, layer in layers:
        problems += _problems(name, layer, stashed, popped)
    for key, name in stashed.items():
        if key not in popped:
            problems.append(f"'{key.name}' is stashed by '{name}' and never popped")
    if problems:
        lines = "\n".join(f"* {problem}" for problem in problems)
        raise SkipError(
            f"Skip connections do not fit together:\n{lines}",
            hint="Use .isolate(Namespace()) for layers that use the same names twice.",
        )


def _problems(
    name: str, layer: SkippableMixin, stashed: dict[SkipKey, str], popped: dict[SkipKey, str]
) -> Iterator[str]:
    """What is wrong with one layer after those before it, which are noted in ``stashed`` and ``popped``."""
    for both in sorted(layer.stashable & layer.poppable):
        yield f"'{name}' stashes and pops '{both}'"
    for key in layer.skip_keys(layer.stashable - layer.poppable):
        if key in stashed:
            yield f"'{key.name}' is stashed by '{stashed[key]}' and again by '{name}'"
        stashed[key] = name
    for key in layer.skip_keys(layer.poppable - layer.stashable):
        if key in popped:
            yield f"'{key.name}' is popped by '{popped[key]}' and again by '{name}'"
        elif key not in stashed:
            yield f"'{key.name}' is popped by '{name}' and stashed by no layer before it"
        popped[key] = name
