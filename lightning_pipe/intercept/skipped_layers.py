"""Answers for the layers and modules that earlier stages run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from lightning_pipe.intercept.call_record import CallRecord, Passed, Repeated, Seen
from lightning_pipe.intercept.contents import refill
from lightning_pipe.intercept.effects import containers_in
from lightning_pipe.intercept.inner_hooks import act
from lightning_pipe.intercept.kept_state import Key, now, put, put_all
from lightning_pipe.intercept.layer_calls import RunCache
from lightning_pipe.intercept.objects import objects_of, put_state
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.torch_functions import leaves_of
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import StepStore
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import tree_unflatten


class SkippedLayers:
    """Answers the calls of layers and modules that earlier stages run, in one run of the step on one stage.

    Args:
        tracker: that of the run.
        skips: what is stashed and not popped yet.
        cache: knows what modules keep, and what their code names.

    Attributes:
        modules: those that it has answered for.
    """

    def __init__(self, tracker: Tracker, skips: StepStore, cache: RunCache) -> None:
        self._tracker, self._skips, self._cache = tracker, skips, cache
        self._former = dict[Key, Any]()
        self.modules: list[nn.Module] = []

    def answer(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a call that another rank runs, with placeholders for its tensors."""
        with self._tracker.paused():
            return self._answer(name, module, args, kwargs)

    def restore(self) -> None:
        """Put back what was there before attributes were set: this rank may run the layer too, for others."""
        put_all(self._former)
        self._former.clear()

    def _answer(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tracker = self._tracker
        arguments = leaves_of(args, kwargs)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        tracker.digest.call(name, arguments, module)
        # the hooks come first: where the layer runs, they acted before it ended and was recorded
        act(tracker, module, args, kwargs, self._leaves)
        thorough = tracker.digest.counts_references(len(tracker.calls))
        if thorough and (following := tracker.following()) is not None and following.name == name:
            tracker.digest.refer(
                tracker.digest.referred(self._cache.references(name, module).values()), following.changing
            )
        call = tracker.expect(name)
        self._cache.state.check_called(name, module)
        tracker.note_read(tensors)
        self.modules.append(module)
        if call.is_plain:  # as mostly
            result = self._placeholder_for(call.leaves[0])
            tracker.follow([result], call)
            return result
        written: list[Tensor] = []
        if call.mutated:
            # in the order of the record: what was given and changed, then what is new
            written = tracker.in_place.written([arguments[position] for position in call.mutated])
            tracker.in_place.forget(written, name)
        for at in call.lent:
            owner = arguments[at] if isinstance(at, int) else vars(module.get_submodule(at[0])).get(at[1])
            if isinstance(owner, Tensor):
                tracker.in_place.keep(owner)
        old = self._old(call)
        if old:
            tracker.in_place.forget([*old.values()], name)
        leaves, new = self._leaves(call, arguments, old)
        tracker.follow([*written, *new], call)
        if call.changing:  # the step may have set it
            self._cache.state.answered(module, call.changing, [effect.where for effect in call.effects])
        for key in call.popped:
            del self._skips[key]
        if call.effects or call.container is not None or call.stashed:
            objects = objects_of(arguments) if any(effect.state is not None for effect in call.effects) else []
            return self._leave(call, module, leaves, list(containers_in((*args, *kwargs.values()))), objects)
        return tree_unflatten(leaves, call.structure)

    def _placeholder_for(self, leaf: TensorSpec | Seen) -> Tensor:
        """A placeholder, or what stands for the same number already: a forward hook has been given it."""
        if isinstance(leaf, Seen):
            found = self._tracker.numbers.find(leaf.number)
            return Placeholder.of(leaf.spec, self._cache.device) if found is None else found
        return Placeholder.of(leaf, self._cache.device)

    def _leaves(
        self, call: CallRecord, arguments: Sequence[Any], old: Mapping[int, Tensor] = MappingProxyType({})
    ) -> tuple[list[Any], list[Tensor]]:
        """What stands for the leaves of a call, and the tensors among them that are no arguments."""
        leaves: list[Any] = []
        new: list[Tensor] = []
        for number, leaf in enumerate(call.leaves):
            if isinstance(leaf, (TensorSpec, Seen)):
                leaves.append(old[number] if number in old else self._placeholder_for(leaf))
                new.append(leaves[-1])
            elif isinstance(leaf, Passed):
                leaves.append(arguments[leaf.argument])
            elif isinstance(leaf, Repeated):
                leaves.append(leaves[leaf.leaf])
            else:
                leaves.append(leaf)
        return leaves, new

    def _leave(
        self, call: CallRecord, module: nn.Module, leaves: list[Any], containers: list[Any], objects: list[Any]
    ) -> Any:
        """Leave behind what the call does besides its result; returns that."""
        whole = tree_unflatten(leaves, call.structure)
        result, stashed, left = whole if call.stashed or call.effects else (whole, (), ())
        for (where, state), value in zip(call.effects, left, strict=True):
            if not isinstance(where, int):
                key = module.get_submodule(where[0]), where[1]
                # of one that is set again the first value alone: those in between are not held where the layer runs
                self._former.setdefault(key, now(*key))
                put(*key, value)
            elif state is None:
                refill(containers[where], value)
            else:
                put_state(objects[where], state, value, objects)
        self._skips.update(zip(call.stashed, stashed, strict=True))
        return result if call.container is None else containers[call.container]

    def _old(self, call: CallRecord) -> dict[int, Tensor]:
        """Tensors in objects that a skipped layer has changed, of which this rank has a value, by number of leaf.

        They may have changed in place there, as those of a static key-value cache do: they are to be asked for again.
        """
        if all(effect.state is None for effect in call.effects):
            return {}
        seen = [(number, leaf) for number, leaf in enumerate(call.leaves) if isinstance(leaf, Seen)]
        found = {number: self._tracker.numbers.find(leaf.number) for number, leaf in seen}
        return {
            number: tensor
            for number, tensor in found.items()
            if tensor is not None and not isinstance(tensor, Placeholder)
        }
