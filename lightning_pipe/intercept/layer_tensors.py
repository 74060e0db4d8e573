"""Refuses changes of what layers hold that other stages would not see, by the step and by other layers.

The step changes something in place: ``layer.tau.mul_(0.95)``, averages of weights, lists.

Each stage has its own layers alone, and runs the code of the step up to them once for each micro-batch, before the
backward passes of others. An attribute that is set is seen where it is set (`layer_state`); of a tensor that stays in
its place the torch functions tell that follow the step between layers, before they change anything. Lists and objects
are compared around thorough runs.

A layer changes what it shares with another one: each rank has its own copy, and only its layers change it there::

    self.seen = []                              rank 0: layer 0          rank 1: layer 1
    for layer in self.layers:                   appends to its copy      appends to its copy
        layer.seen = self.seen

Who else holds something is looked for when a call has changed it, so what stays as it is (a configuration) may be
shared. What a module reaches in other ways than as its own part (``self.owner = [owner]``) must not change in its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.intercept.kept_state import Place, is_data, is_own, written
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.tensor_state import memory_of
from lightning_pipe.intercept.user_objects import values_in, walk

if TYPE_CHECKING:
    from lightning_pipe.intercept.layer_state import LayerState

IN_A_HOOK = (
    "Change it in a hook, such as on_train_batch_start or on_train_batch_end, once for a batch; or give the layer an "
    "argument."
)
_HINT = (
    "Change it once for a batch, in on_train_batch_start or on_train_batch_end; averages of weights there, too, or by "
    "Lightning's callback EMAWeightAveraging. A layer may change its buffers in its forward pass."
)


def check_unchanged(state: LayerState, changed: Sequence[Tensor], function: str, *, training: bool) -> None:
    """A function is about to change tensors in place, outside of layers.

    Raises:
        CutError: one of them shares its memory with a parameter or buffer of a layer or an outside module, or in an
            evaluation with any parameter.
    """
    # looked up anew: a parameter may get other memory, and another tensor its former one
    holders = [each for part in state.root_of for each in ((part, part._parameters), (part, part._buffers))]
    holders += [] if training else [(part, part._parameters) for part in state.modules.values()]
    places = {_key(each): (part, name) for part, held in holders for name, each in held.items() if each is not None}
    for tensor in changed:
        if not isinstance(tensor, Placeholder) and (place := places.get(_key(tensor))) is not None:
            raise CutError(
                f"'{function}' changes `{state.written(*place)}` in place in the step, which runs once for each "
                "micro-batch, on the ranks of other stages, too.",
                hint=_HINT,
            )


def _key(tensor: Tensor) -> int:
    memory = memory_of(tensor)
    return id(tensor) if memory is None or is_absent(tensor) else memory  # all that are absent share theirs


def held_by(state: LayerState) -> Snapshot:
    """What layers hold before a run of the step."""
    own = {name: part for name, part in state.modules.items() if part in state.root_of and is_own(part)}
    # what those hold, too, whose changes all ranks get, may change
    return Snapshot({**{f"self.{name}": part for name, part in state.around.items()}, **own}, buffers=False)


def check_held(before: Snapshot, state: LayerState) -> None:
    """Behind the run, which began with what is ``before``.

    Raises:
        CutError: the step has changed something else than what it has set, or calls keep.
    """
    for change in before.changes():
        name, attribute = change.path[:2]  # without buffers, and first those of `around`
        part = state.modules.get(name)
        if part is not None and not (state.is_kept(part, attribute) or (part, attribute) in state.set_by_run):
            raise CutError(
                f"the step changes what `{written(name, attribute)}` refers to, which other stages do not see.",
                hint=f"{IN_A_HOOK} Or set another value in its place: `layer.items = [*layer.items, item]`.",
            )


def check_not_shared(
    name: str, called: nn.Module, place: Place, altered: Sequence[Any], others: Iterable[tuple[str, nn.Module]]
) -> None:
    """The call of a layer or outside module has changed something in place.

    Args:
        name: the module.
        called: the module.
        place: where in it.
        altered: the lists, dictionaries and objects there that have changed.
        others: the modules that the call must not change, and its own parts, by name.

    Raises:
        CutError: another module holds one of them.
    """
    wanted, own = {id(each) for each in altered}, {id(part) for part in called.modules()}
    for other, part in others:
        for held, value in vars(part).items() if id(part) not in own else ():
            reached = walk(value, values_in) if is_data(held) else ()
            for found in (each for each in reached if id(each) in wanted):
                here, there = written(name, *place), written(other, held)
                raise CutError(
                    f"'{name}' changes a {type(found).__qualname__} in its forward pass that `{here}` and `{there}` "
                    "share: stages would see different ones.",
                    hint="Let each module keep one of its own, and join them behind the layers, or let the step pass "
                    "it to the layers as an argument.",
                )


def changed_elsewhere(name: str, changed: str) -> CutError:
    """The call of a module changes an attribute of another one, given as code writes it."""
    return CutError(
        f"'{name}' changes `{changed}` in its forward pass, which belongs to another module: other stages would not "
        "see it.",
        hint="Let the forward pass return it or keep it in its own module, and let the step do the rest behind the "
        "layers.",
    )
