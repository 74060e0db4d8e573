"""Answers for the layers and modules that earlier stages run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.intercept.describe import stand_ins
from lightning_pipe.intercept.effects import containers_in
from lightning_pipe.intercept.kept_state import Key, now, put, put_all
from lightning_pipe.intercept.layer_calls import RunCache
from lightning_pipe.intercept.objects import objects_of, put_state
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.references import References
from lightning_pipe.intercept.snapshot import refill
from lightning_pipe.intercept.torch_functions import keywords_of, leaves_of
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
        tracker.digest.call(name, arguments, keywords_of(args, kwargs), module)
        # the hooks come first: where the layer runs, they acted before it ended and was recorded
        self._let_hooks_act(module, arguments)
        thorough = tracker.digest.counts_references(len(tracker.calls))
        if thorough and (following := tracker.following()) is not None and following.name == name:
            references = References(name, module, self._cache.state, arguments)
            tracker.digest.refer(tracker.digest.referred(references.values()), following.changing)
        call = tracker.expect(name)
        self._cache.state.check_called(name, module)
        tracker.note_leaves(tensors)
        self.modules.append(module)
        if call.is_plain and tracker.numbers.find(call.numbers[0]) is None:  # as mostly
            result = Placeholder(call.leaves[0], self._cache.device)
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
        # Of which this rank has a value: they may have changed in place where the layer runs, as those of a static
        # key-value cache do, and are to be asked for again.
        old = {number: tensor for number in call.new_numbers if (tensor := tracker.numbers.find(number)) is not None}
        values = {n: each for n, each in old.items() if not isinstance(each, Placeholder | nn.Parameter)}
        tracker.in_place.forget([*values.values()], name)
        for number, tensor in values.items():
            tracker.numbers.bind(tensor, number)
        leaves, new = self._leaves(call, arguments)
        tracker.follow([*written, *new], call)
        if call.changing:  # the step may have set it
            self._cache.state.answered(module, call.changing, [effect.where for effect in call.effects])
        for key in call.popped:
            del self._skips[key]
        whole = tree_unflatten(leaves, call.structure)
        if call.effects or call.container is not None or call.stashed:
            return self._leave(call, module, whole, list(containers_in((*args, *kwargs.values()))), arguments)
        return whole

    def _let_hooks_act(self, module: nn.Module, arguments: Sequence[Any]) -> None:
        """Let the hooks act that did so when an earlier stage ran a layer."""
        tracker = self._tracker
        # Each hook that acted has a call of its own in front of the layer's, in the order in which they acted.
        while (call := tracker.following()) is not None and call.hook is not None:
            path, number = call.hook
            tracker.calls.append(call)
            tracker.digest.call(call.name, ())
            part = module.get_submodule(path)
            hooks = list(part._forward_hooks.values())
            if number >= len(hooks):
                raise CutError(
                    f"'{call.name}' has {len(hooks)} forward hooks on this stage, and more on the stage that runs it.",
                    hint="Register the same hooks on all ranks.",
                )
            leaves, tensors = self._leaves(call, arguments)
            tracker.follow(tensors, call)
            with tracker.acting():
                hooks[number](part, *tree_unflatten(leaves, call.structure))

    def _leaves(self, call: CallRecord, arguments: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
        """What stands for the leaves of a call, and the tensors among them that are no arguments.

        A tensor may be there already: a forward hook inside the layer has been given it, or an object holds it.
        """
        there = map(self._tracker.numbers.find, call.new_numbers)
        leaves = stand_ins(call.leaves, arguments, self._cache.device, there)
        return leaves, [leaf for leaf, of in zip(leaves, call.leaves, strict=True) if isinstance(of, TensorSpec)]

    def _leave(
        self, call: CallRecord, module: nn.Module, whole: Any, containers: list[Any], arguments: Sequence[Any]
    ) -> Any:
        """Leave behind what the call does besides its result; returns that."""
        objects = objects_of(arguments) if any(effect.state is not None for effect in call.effects) else []
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
