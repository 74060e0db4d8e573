"""What a module and others hold both: a list, a dictionary, an object, or another module.

Each rank has its own copy of what two layers share, and only the layers that it runs change it there::

    self.seen = []                              rank 0: layer 0          rank 1: layer 1
    for layer in self.layers:                   appends to its copy      appends to its copy
        layer.seen = self.seen

Who else holds something is looked for when a call has changed it, so what stays as it is (a configuration) may be
shared. What a module reaches in other ways than as its own part (``self.owner = [owner]``) must not change in its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import Place, is_data, is_own, written
from lightning_pipe.intercept.references import References, inside

_HINT = (
    "Let each module keep one of its own, and join them behind the layers, or let the step pass it to the layers as an "
    "argument."
)


class Sharing:
    """Knows what of a module others hold, too.

    Args:
        module: the user's module.
        roots: the layers and outside modules.

    Attributes:
        computing: the ``id`` of all parts of these.
    """

    def __init__(self, module: nn.Module, roots: Iterable[nn.Module]) -> None:
        self._module = module
        self.computing = {id(part) for root in roots for part in root.modules()}
        self._parts: dict[int, set[int]] = {}

    def check(self, root: tuple[str, nn.Module], place: Place, altered: Sequence[Any], *, last: bool) -> None:
        """A call has changed something in place.

        Args:
            root: the module that has been called, with its name.
            place: where in it.
            altered: the lists, dictionaries and objects there that have changed.
            last: whether the last stage has run it: it completes the step, and may change the LightningModule's.

        Raises:
            CutError: another module holds one of them.
        """
        name, called = root
        path, attribute = place
        wanted, own = {id(each) for each in altered}, {id(part) for part in called.modules()}
        for other, part in self._module.named_modules():
            if id(part) in own or (last and id(part) not in self.computing):
                continue
            for held, value in vars(part).items():
                found = next(_held(value, wanted), None) if is_data(held) else None
                if found is not None:
                    here, there = written(name, path, attribute), written(other, held)
                    raise CutError(
                        f"'{name}' changes a {type(found).__qualname__} in its forward pass that `{here}` and "
                        f"`{there}` share: stages would see different ones.",
                        hint=_HINT,
                    )

    def foreign(self, root: nn.Module) -> dict[str, nn.Module]:
        """The modules of the user's that a module may change and that are no parts of it, by their names."""
        reached = References(root).reached
        return {name: part for name, part in self._module.named_modules() if part in reached and is_own(part)}

    def has(self, root: nn.Module, part: nn.Module) -> bool:
        """Whether a module is the layer or outside module ``root``, or a part of it."""
        if part is root or id(part) in self._parts.get(id(root), ()):
            return True
        self._parts[id(root)] = {id(each) for each in root.modules()}
        return id(part) in self._parts[id(root)]

    def may_change(self, part: nn.Module, *, last: bool) -> bool:
        """Whether the call of another module may change an attribute of ``part``: the last stage completes the step."""
        return last and id(part) not in self.computing

    def name_of(self, part: nn.Module) -> str:
        """The name of a module."""
        return next((name for name, each in self._module.named_modules() if each is part), type(part).__qualname__)


def changed_elsewhere(name: str, other: str, attribute: str) -> CutError:
    """The call of a module changes an attribute of another one.

    Args:
        name: the module that is called.
        other: the other one.
        attribute: of that.
    """
    return CutError(
        f"'{name}' changes `{written(other, attribute)}` in its forward pass, which belongs to another module: other "
        "stages would not see it.",
        hint="Let the forward pass return it or keep it in its own module, and let the step do the rest behind the "
        "layers.",
    )


def _held(value: Any, wanted: set[int]) -> Iterator[Any]:
    """What is wanted of all that a value leads to, by way of lists, dictionaries and objects of the user's."""
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in wanted:
            yield value
        if id(value) not in seen and not isinstance(value, nn.Module):
            seen.add(id(value))
            pending += inside(value)
