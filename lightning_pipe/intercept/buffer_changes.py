"""Buffers of layers and outside modules that the step's own code changes in place, such as ``layer.tau.mul_(0.95)``.

An attribute that is set is seen where it is set. A buffer stays in its place, so the torch functions tell that follow
the step between layers: before they change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.stage_run import StageRun
from lightning_pipe.intercept.state_reads import StateReads
from lightning_pipe.intercept.tensor_state import memory_of, same_objects

_Place = tuple[nn.Module, str]


class BufferChanges:
    """Finds the buffers among the tensors that change in place.

    Args:
        modules: gives all parts of layers and outside modules.
        reads: knows what they are called.
        note_set: told of a buffer of which each of several stages of this rank has to see its own value.
    """

    def __init__(
        self, modules: Callable[[], Iterable[nn.Module]], reads: StateReads, note_set: Callable[[nn.Module, str], None]
    ) -> None:
        self._modules = modules
        self._reads, self._note_set = reads, note_set
        # the buffers by what is the same for all that share their memory; those of other ranks have none: by name
        self._known: list[Tensor | None] = []
        self._places: dict[int | str, _Place] = {}

    def check(self, run: StageRun, written: Sequence[Tensor], function: str) -> None:
        """A function is about to change tensors in place, outside of layers.

        Args:
            run: the run of the step.
            written: the tensors, and what they are views of.
            function: its name.

        Raises:
            CutError: the stage that runs the module does not come here, or the change could not be put back.
        """
        changed = [place for tensor in written if (place := self._place(tensor)) is not None]
        for part, name in dict.fromkeys(changed):
            buffer, root = part._buffers[name], self._reads.root_of(part)
            if not run.tracker.waiting and any(id(each) == root for each in run.skipped_layers.modules):
                raise CutError(
                    f"'{function}' changes the buffer `{self._reads.written(part, name)}` in place behind the layers "
                    "of its stage, which does not run this code: it would go on with the old value.",
                    hint="Change it before the layers are called, inside a layer, or in on_train_batch_end.",
                )
            if not run.apart or isinstance(buffer, AbsentTensor):
                continue
            if all(tensor is not buffer for tensor in written):
                raise CutError(
                    f"'{function}' changes the buffer `{self._reads.written(part, name)}` by way of a tensor that "
                    "shares its memory, and several stages of this rank run this code.",
                    hint="Change the buffer itself, under torch.no_grad(), and not its .data; or change it in "
                    "on_train_batch_end.",
                )
            self._note_set(part, name)

    @cached_property
    def _parts(self) -> list[nn.Module]:
        return [part for part in self._modules() if part._buffers]

    def _place(self, tensor: Tensor) -> _Place | None:
        """The module and the name of the buffer that a tensor shares its memory with."""
        buffers = [buffer for part in self._parts for buffer in part._buffers.values()]
        if not same_objects(buffers, self._known):
            self._known = buffers
            self._places = {
                _key(buffer): (part, name)
                for part in self._parts
                for name, buffer in part._buffers.items()
                if buffer is not None
            }
        return self._places.get(_key(tensor)) if self._places else None


def _key(tensor: Tensor) -> int | str:
    if isinstance(tensor, AbsentTensor):
        return next(iter(tensor.origin.names), id(tensor))
    memory = memory_of(tensor)
    return id(tensor) if memory is None else memory
