"""Follows the user's code where the ranks take turns: one of them computes, the others follow its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing, check_plain, entry_of
from lightning_pipe.intercept.numbers import SAME_PATH
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.tensor_state import version_of
from lightning_pipe.intercept.torch_functions import METADATA, draws, function_name, leaves_of
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.torch_internals import storage_uses

if TYPE_CHECKING:
    from lightning_pipe.engine.turns import Turns
    from lightning_pipe.parameters.ownership import Ownership


class TurnTracker(Tracker):
    """A mode around one run of the user's step by ranks that take turns.

    The rank with the turn computes what comes from layers and parameters. It records its calls, and tells them to all
    others at the end of its turn. These follow them with placeholders, as a stage of `Tracker` does that waits, and
    learn what the code has read from tensors. The turn passes on where a layer of another rank is called, or code needs
    a parameter of another rank: all ranks see that by themselves, since they run the same code.

    What a rank did in its turn, and the values that the next layer is given, are a `Crossing`. Any other value is asked
    for by its number when it is needed; the ranks without the turn answer with one without calls while they wait.

    Args:
        mail: reaches the other ranks.
        first: the rank that has the first turn.
        parameter_use: the module's parameters and buffers outside layers.
        isolated: gives a context with the random stream of a key.
        generators: of the random numbers that all ranks draw alike.

    Attributes:
        holder: the rank that has the turn.
    """

    alone = shows_objects = True

    def __init__(
        self,
        mail: Turns,
        first: int,
        parameter_use: Ownership,
        isolated: Callable[..., AbstractContextManager[None]],
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__(isolated, parameter_use, partial=mail.ranks > 1)
        self._mail, self._generators = mail, generators
        self.holder, self._begin = first, 0  # the number of calls before the turn
        self.waiting = first != mail.rank
        self.digest.idle, self.digest.compares = True, False  # ranks that follow each other compare nothing
        # what the rank with the turn has told; ``None`` as long as it has not
        self._told: Crossing | None = None
        # by number, the rank that has computed a tensor; by rank, the numbers of the values that it got with its turn
        self._homes: dict[int, int] = {}
        self._known: dict[int, set[int]] = {}
        # by number, the version of a tensor here when other ranks had the same value, and whether another tensor has
        # its memory where it comes from
        self._elsewhere: dict[int, tuple[int | None, bool]] = {}

    # ------------------------------------------------------------------ the turn

    def pass_to(self, rank: int, given: Iterable[Any] = ()) -> None:
        """Let another rank go on.

        Args:
            rank: it has the turn from here on.
            given: it will need the tensors among these.
        """
        if rank == self.holder:
            return
        with self.paused():
            told = None
            if self.waiting:
                told = self.learn()
            else:
                self._tell(rank, given)
            self._homes |= dict.fromkeys(self._left(), self.holder)
            self.holder, self._begin, self._told = rank, len(self.calls), None
            self.waiting = rank != self._mail.rank
            if told is not None and not self.waiting:
                self._fill(told)

    def _left(self) -> set[int]:
        """The numbers of the tensors that the calls of the turn have made or changed."""
        return {number for call in self.calls[self._begin :] for number in call.numbers}

    def _tell(self, rank: int, given: Iterable[Any]) -> None:
        """Tell all others what this rank has done in its turn."""
        self._check_changes()
        here = [each for each in given if isinstance(each, Tensor) and not isinstance(each, Placeholder | nn.Parameter)]
        numbers = {number for each in here if (number := self.numbers.of(each)) is not None}
        known = self._known.setdefault(rank, set())
        calls = tuple(self.calls[self._begin :])
        for peer in (each for each in range(self._mail.ranks) if each != self._mail.rank):
            # All must know what was called; values are for the rank that goes on, and it keeps them.
            self._mail.send(self._crossing(sorted(numbers - known) if peer == rank else (), calls), peer)
        known |= numbers

    def _check_changes(self) -> None:
        """At the end of this rank's turn: a value that other ranks have has changed by a call alone that names it.

        Raises:
            CutError: another tensor with its memory has changed, or one on the rank that it came from would have to.
        """
        told = self._left()
        for number, (version, shared) in [*self._elsewhere.items()]:
            tensor = self.numbers.find(number)
            if tensor is None or isinstance(tensor, Placeholder):
                del self._elsewhere[number]
            elif version_of(tensor) != version:
                if shared or number not in told:
                    raise CutError(
                        f"tensor {number}, {tuple(tensor.shape)}, is changed in place, another tensor shares its "
                        "memory, and they have been on different ranks.",
                        hint="Use the out-of-place form, or .clone() one of them.",
                    )
                del self._elsewhere[number]
                for known in self._known.values():
                    known.discard(number)

    def learn(self) -> Crossing:
        """Learn what the rank with the turn has done, until it ends its turn; returns that."""
        told = self._ask()
        if not self.complete:
            raise CutError(
                f"this rank has followed {len(self.calls)} calls outside its layers, rank {self.holder} has made "
                f"{len(self.expected)}.",
                hint=SAME_PATH,
            )
        return told

    def _ask(self) -> Crossing:
        """Wait for what the rank with the turn tells, and answer what it asks."""
        while self._told is None:
            with self.paused():
                message = self._mail.receive(self.holder)
                if isinstance(message, Crossing):
                    self._told = message
                    self.expected = (*self.calls, *message.path.calls)
                else:
                    self._mail.send(self._crossing(message), self.holder)
        return self._told

    def finish(self, rank: int, result: Iterable[Any]) -> bool:
        """The step is about to return: ``rank`` gets all values that are left; returns whether it is this one."""
        self.pass_to(rank, result)
        with self.paused():
            if self.waiting:
                self.learn()
                return False
            self._fetch([tensor for _, tensor in self.numbers.alive() if isinstance(tensor, Placeholder)])
            self._tell(rank, ())
        return True

    # ------------------------------------------------------------------ values

    def _crossing(self, numbers: Iterable[int], calls: tuple[CallRecord, ...] = ()) -> Crossing:
        """Some calls, and the values of some tensors, to be sent."""
        entries, tensors = list[LiveTensor](), dict[int, Tensor]()
        for number in numbers:
            tensor = self.numbers.find(number)
            if tensor is None or isinstance(tensor, Placeholder):
                raise CutError(
                    f"tensor {number} is needed by another rank, and is not kept on this one, which has computed it.",
                    hint="Keep the tensor itself rather than something made of it in another way on each rank.",
                )
            check_plain(tensor, "is needed by another rank")
            # 2: the tensor, and the storage object that this line makes
            shared = bool(storage_uses(tensor.untyped_storage()._cdata) > 2)
            self._elsewhere[number] = version_of(tensor), self._elsewhere.get(number, (None, False))[1]
            entries.append(entry_of(number, tensor, shared))
            tensors[number] = tensor.detach()
        return Crossing(RunRecord(calls, tuple(entries)), tensors)

    def _fetch(self, tensors: Iterable[Tensor]) -> None:
        """Get the values of placeholders from the ranks that have computed them."""
        wanted: dict[int, list[int]] = {}
        for tensor in tensors:
            number = self.numbers.of(tensor)
            home = None if number is None or number in self.numbers.unfilled else self._homes.get(number)
            if number is not None and home is not None and number not in wanted.setdefault(home, []):
                wanted[home].append(number)
        for home, numbers in wanted.items():
            self._mail.send(numbers, home)
            self._fill(self._mail.receive(home))

    def _fill(self, crossing: Crossing) -> None:
        for number, spec, _, shared in crossing.path.entries:
            if isinstance(filled := self.numbers.find(number), Placeholder):
                self.numbers.fill(number, spec.lay_out(crossing.tensors[number]).detach())
                self._elsewhere[number] = version_of(filled), shared

    # ------------------------------------------------------------------ the tracker's own questions

    def touch(self, tensors: list[Tensor], name: str, new: bool = False) -> None:
        """Note that real code uses ``tensors``; values that are elsewhere are fetched."""
        if any(isinstance(tensor, Placeholder) for tensor in tensors):
            with self.paused():
                self._fetch([tensor for tensor in tensors if isinstance(tensor, Placeholder)])
        super().touch(tensors, name, new)

    def following(self) -> CallRecord | None:
        """The call that the rank with the turn made here, if any."""
        if self.waiting:
            self._ask()
        return super().following()

    # ------------------------------------------------------------------ the mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record or follow one torch call outside layers, on the rank that has the parameters in it."""
        if not (self._off or self.function) and self.partial:
            leaves = leaves_of(args, kwargs or {})
            parameters = [leaf for leaf in leaves if type(leaf) is not Tensor and isinstance(leaf, nn.Parameter)]
            if parameters and function_name(func) not in METADATA:
                self.pass_to(self._mail.place("", parameters, self.holder), leaves)
        return super().__torch_function__(func, types, args, kwargs)

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        own = kwargs.get("generator")
        before = self._states(own) if (random := self.partial and draws(func, name)) else ()
        result = super()._run(name, func, args, kwargs, tensors)
        if random and (after := self._states(own)) != before:  # the other ranks go on with the same numbers
            self.calls[-1] = self.calls[-1]._replace(drawn=after)
        return result

    def _stream_of(self, *key: int) -> AbstractContextManager[None]:
        return nullcontext()  # that of the step: all ranks go on with the state that it has then

    def _answer(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        result = super()._answer(name, func, args, kwargs, tensors)
        if drawn := self.calls[-1].drawn:
            generators = self._all_generators(kwargs.get("generator"))
            for generator, state in zip(generators, drawn, strict=True):
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return result

    def _states(self, own: torch.Generator | None) -> tuple[bytes, ...]:
        return tuple(bytes(each.get_state().numpy().tobytes()) for each in self._all_generators(own))

    def _all_generators(self, own: torch.Generator | None) -> list[torch.Generator]:
        return [*self._generators, *([] if own is None else [own])]
