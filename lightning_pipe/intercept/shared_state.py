"""What a module and others hold both: a list, a dictionary, an object, or another module.

Each rank has its own copy of what two layers share, and only the layers that it runs change it there::

    self.seen = []                              rank 0: layer 0          rank 1: layer 1
    for layer in self.layers:                   appends to its copy      appends to its copy
        layer.seen = self.seen

Who else holds something is looked for when a call has changed it, so what stays as it is (a configuration) may be
shared. What a module reaches in other ways than as its own part (``self.owner = [owner]``) must not change in its call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import Place, is_data, written
from lightning_pipe.intercept.references import walk
from lightning_pipe.intercept.user_objects import values_in

_HINT = (
    "Let each module keep one of its own, and join them behind the layers, or let the step pass it to the layers as an "
    "argument."
)


def check_not_shared(
    module: nn.Module,
    root: tuple[str, nn.Module],
    place: Place,
    altered: Sequence[Any],
    free: Callable[[nn.Module], bool],
) -> None:
    """A call has changed something in place.

    Args:
        module: the user's module.
        root: the layer or outside module that has been called, with its name.
        place: where in it.
        altered: the lists, dictionaries and objects there that have changed.
        free: whether the call may change what a module holds that is no part of it.

    Raises:
        CutError: another module holds one of them.
    """
    name, called = root
    path, attribute = place
    wanted, own = {id(each) for each in altered}, {id(part) for part in called.modules()}
    for other, part in module.named_modules():
        if id(part) in own or free(part):
            continue
        for held, value in vars(part).items():
            reached = walk(value, values_in) if is_data(held) else ()
            for found in (each for each in reached if id(each) in wanted):
                here, there = written(name, path, attribute), written(other, held)
                raise CutError(
                    f"'{name}' changes a {type(found).__qualname__} in its forward pass that `{here}` and `{there}` "
                    "share: stages would see different ones.",
                    hint=_HINT,
                )


def changed_elsewhere(name: str, changed: str) -> CutError:
    """The call of a module changes an attribute of another one.

    Args:
        name: the module that is called.
        changed: the attribute as code writes it.
    """
    return CutError(
        f"'{name}' changes `{changed}` in its forward pass, which belongs to another module: other stages would not "
        "see it.",
        hint="Let the forward pass return it or keep it in its own module, and let the step do the rest behind the "
        "layers.",
    )
