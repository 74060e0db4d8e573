"""Changes in place: which tensors they reach, and which they must not because other stages would not see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import Place
from lightning_pipe.intercept.numbers import Numbers
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.tensor_state import memory_of, version_of
from lightning_pipe.intercept.torch_functions import unique
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import storage_uses

if TYPE_CHECKING:
    from lightning_pipe.parameters.ownership import Ownership

Noted = tuple[Tensor, int | None, Sequence[Tensor]]
"""A tensor before a call: its version, and what is written to as well if it changes."""


class InPlace:
    """What changes in place mean in one run of the step on one stage.

    Args:
        numbers: those of the run.
        parameter_use: the module's parameters and buffers outside layers.
        partial: whether other stages run some of the layers.
    """

    def __init__(self, numbers: Numbers, parameter_use: Ownership, *, partial: bool) -> None:
        self._numbers, self._parameter_use, self._partial = numbers, parameter_use, partial
        # kept, so that no other storage gets its address
        self._lent: dict[int, Any] = {}
        # with the versions of tensors and the hashes of arrays
        self._arrays: list[tuple[Tensor, int | None, np.ndarray[Any, Any], int]] = []

    def noted(self, tensors: Sequence[Tensor]) -> list[Noted]:
        """What a call is given, to find out with `changed` what it did to it."""
        return [
            (tensor, version_of(tensor), () if tensor._base is None else self.behind(tensor))  # mostly none
            for tensor in tensors
        ]

    def changed(self, noted: Sequence[Noted], name: str) -> list[Noted]:
        """Which of them the call of ``name`` has changed."""
        changed = [each for each in noted if version_of(each[0]) != each[1]]
        if changed:
            self.check_not_lent([tensor for tensor, *_ in changed], name)
        return changed

    def written(self, changed: Sequence[Tensor]) -> list[Tensor]:
        """What is written to when tensors change in place: they and what they are views of."""
        return unique([*changed, *(base for tensor in changed for base in self.behind(tensor))])

    def behind(self, tensor: Tensor) -> Sequence[Tensor]:
        """What changes in place with a tensor: what it is a view of, unless it is derived.

        A view of a derived tensor is derived itself: that both change needs no word.
        """
        base = tensor._base
        return () if base is None or self._numbers.derived(tensor) else (base,)

    def lend(self, result: Tensor, owners: Iterable[tuple[int | Place, Any]]) -> Sequence[int | Place]:
        """Whose memory a layer's result shares, of the tensors that every stage has for itself: it stays as it is.

        Args:
            result: a leaf of what the layer returns.
            owners: the leaves of its arguments with their positions, and its attributes with their places.
        """
        if result.grad_fn is not None and result._base is None:
            return ()  # the usual case: new memory
        memory = memory_of(result)
        if memory is None:
            return ()
        lent = [
            at
            for at, owner in owners
            if isinstance(owner, Tensor) and not self._numbers.derived(owner) and memory_of(owner) == memory
        ]
        if lent:
            self.keep(result)
        return lent

    def keep(self, tensor: Tensor) -> None:
        """A layer's result shares the memory of what every stage has for itself; other stages have it as a copy."""
        if (memory := memory_of(tensor)) is not None:
            self._lent[memory] = tensor.untyped_storage()

    def is_lent(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory that every stage has for itself, and a layer's result, too."""
        return bool(self._lent) and memory_of(tensor) in self._lent

    def check_not_lent(self, changed: Sequence[Tensor], name: str) -> None:
        """Raise if a change in place would not reach both on all stages: a layer's result, and what it is a view of."""
        for tensor in changed if self._partial else ():
            if self.is_lent(tensor):
                raise CutError(
                    f"'{name}' changes a tensor {tuple(tensor.shape)} {tensor.dtype} in place, and an argument or "
                    "attribute of a layer shares its memory with what that has returned: other stages have a copy.",
                    hint="Use the out-of-place form, or .clone() one of them.",
                )

    def forget(self, written: Sequence[Tensor], name: str) -> None:
        """Turn known tensors into placeholders, because ``name`` writes another stage's values into them."""
        known = [tensor for tensor in written if not isinstance(tensor, Placeholder)]
        for tensor in known:
            owned = self._parameter_use.name_of(tensor)
            if owned is not None:
                raise CutError(
                    f"'{name}' changes '{owned}' in place before this stage's layers, with values of an earlier stage.",
                    hint=f"Change '{owned}' after the last layer, or inside a layer: layers=[...] may name the module "
                    "that has it (a codebook, a queue), between those that are called before and behind it.",
                )
        # Taken before the tensors are swapped: what then still refers to a storage is a view that keeps the old value.
        memories = [tensor.untyped_storage() for tensor in known]
        for tensor in known:
            self._numbers.replace(tensor, Placeholder(TensorSpec.of(tensor), tensor.device))
        if any(storage_uses(memory._cdata) > 1 for memory in memories):  # 1: the list here
            raise CutError(
                f"'{name}' changes a tensor {tuple(known[0].shape)} {known[0].dtype} in place before this stage's "
                "layers, with values of an earlier stage, and another tensor shares its memory.",
                hint="Change the tensor itself, before there are views of it, or use the out-of-place form.",
            )

    def array_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The ``.numpy()`` of a tensor: a copy, since nobody would count what changes in it."""
        array = func(args[0].clone(), *args[1:], **kwargs)
        self._arrays.append((args[0], version_of(args[0]), array, hash(array.tobytes())))
        return array

    def check_arrays(self) -> None:
        """The step is about to end: raise if a tensor or its array has changed, which share no memory here."""
        for tensor, version, array, content in self._arrays:
            if version_of(tensor) != version or hash(array.tobytes()) != content:
                raise CutError(
                    f"a tensor of shape {array.shape} or its `.numpy()` changes in place, and they share their memory.",
                    hint="Take the array of a copy: `.clone().numpy()`.",
                )
