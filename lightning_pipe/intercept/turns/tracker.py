"""Follows the user's code where the ranks take turns: one of them computes, the others follow its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing, check_plain, entry_of
from lightning_pipe.intercept.in_place import ParameterUse
from lightning_pipe.intercept.numbers import SAME_PATH, Numbers
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.tensor_state import version_of
from lightning_pipe.intercept.torch_functions import METADATA, draws, function_name, leaves_of
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.torch_internals import storage_uses


class Mail(Protocol):
    """Knows the ranks of a pipeline, and brings objects to the others; those from one rank arrive in order."""

    rank: int
    ranks: int

    def send(self, obj: Any, rank: int) -> None:
        """Start to send an object, which may be changed at once."""

    def receive(self, rank: int) -> Any:
        """The next object that a rank sends."""

    def place(self, name: str, tensors: Iterable[Tensor], holder: int) -> int:
        """The rank that runs code with some parameters and buffers, of a name, if ``holder`` has the turn."""


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
    """

    alone = shows_objects = True

    def __init__(
        self,
        mail: Mail,
        first: int,
        parameter_use: ParameterUse,
        isolated: Callable[..., AbstractContextManager[None]],
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__(None, isolated, parameter_use, partial=mail.ranks > 1)
        self._mail, self._generators = mail, generators
        self.turn = _Turns(first, mail.rank)
        self.waiting = not self.turn.mine
        self.digest.idle = True  # ranks that follow each other compare nothing

    # ------------------------------------------------------------------ the turn

    def pass_to(self, rank: int, given: Iterable[Any] = ()) -> None:
        """Let another rank go on.

        Args:
            rank: it has the turn from here on.
            given: it will need the tensors among these.
        """
        turn = self.turn
        if rank == turn.holder:
            return
        with self.paused():
            told = None
            if turn.mine:
                self._tell(rank, given)
            else:
                told = self.learn()
            turn.end(rank, self.calls)
            self.waiting = not turn.mine
            if told is not None and turn.mine:
                self._fill(told)

    def _tell(self, rank: int, given: Iterable[Any]) -> None:
        """Tell all others what this rank has done in its turn."""
        self.turn.check_changes(self.calls, self.numbers)
        numbers = {number for each in given if isinstance(each, Tensor) and (number := self._real(each)) is not None}
        known = self.turn.known.setdefault(rank, set())
        calls = tuple(self.calls[self.turn.begin :])
        for peer in (each for each in range(self._mail.ranks) if each != self._mail.rank):
            # All must know what was called; values are for the rank that goes on, and it keeps them.
            self._mail.send(self._crossing(sorted(numbers - known) if peer == rank else (), calls), peer)
        known |= numbers

    def learn(self) -> Crossing:
        """Learn what the rank with the turn has done, until it ends its turn; returns that."""
        told = self._ask()
        if len(self.calls) != len(self._expected):
            raise CutError(
                f"this rank has followed {len(self.calls)} calls outside its layers, rank {self.turn.holder} has made "
                f"{len(self._expected)}.",
                hint=SAME_PATH,
            )
        return told

    def _ask(self) -> Crossing:
        """Wait for what the rank with the turn tells, and answer what it asks."""
        turn = self.turn
        while turn.told is None:
            with self.paused():
                message = self._mail.receive(turn.holder)
                if isinstance(message, Crossing):
                    turn.told = message
                    self._expected = (*self.calls, *message.path.calls)
                else:
                    self._mail.send(self._crossing(message), turn.holder)
        return turn.told

    def finish(self, rank: int, result: Iterable[Any]) -> bool:
        """The step is about to return: ``rank`` gets all values that are left; returns whether it is this one."""
        self.pass_to(rank, result)
        with self.paused():
            if not self.turn.mine:
                self.learn()
                return False
            self._fetch([tensor for _, tensor in self.numbers.alive() if isinstance(tensor, Placeholder)])
            self._tell(rank, ())
        return True

    # ------------------------------------------------------------------ values

    def _real(self, tensor: Tensor) -> int | None:
        """The number of a tensor whose value is here."""
        return None if isinstance(tensor, (Placeholder, nn.Parameter)) else self.numbers.of(tensor)

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
            self.turn.elsewhere[number] = version_of(tensor), self.turn.elsewhere.get(number, (None, False))[1]
            entries.append(entry_of(number, tensor, shared))
            tensors[number] = tensor.detach()
        return Crossing(RunRecord(calls, tuple(entries)), tensors)

    def _fetch(self, tensors: Iterable[Tensor]) -> None:
        """Get the values of placeholders from the ranks that have computed them."""
        wanted: dict[int, list[int]] = {}
        for tensor in tensors:
            number = self.numbers.of(tensor)
            home = None if number is None or number in self.numbers.unfilled else self.turn.homes.get(number)
            if number is not None and home is not None and number not in wanted.setdefault(home, []):
                wanted[home].append(number)
        for home, numbers in wanted.items():
            self._mail.send(numbers, home)
            self._fill(self._mail.receive(home))

    def _fill(self, crossing: Crossing) -> None:
        for number, spec, _, shared in crossing.path.entries:
            if isinstance(self.numbers.find(number), Placeholder):
                self.numbers.fill(number, spec.lay_out(crossing.tensors[number]).detach())
                filled = self.numbers.find(number)
                if filled is not None:
                    self.turn.elsewhere[number] = version_of(filled), shared

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

    @property
    def complete(self) -> bool:
        """A rank that waits never knows that the turn comes to it before a layer of its own is called."""
        return False

    # ------------------------------------------------------------------ the mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record or follow one torch call outside layers, on the rank that has the parameters in it."""
        if not (self._off or self.function) and self.partial:
            leaves = leaves_of(args, kwargs or {})
            parameters = [leaf for leaf in leaves if type(leaf) is not Tensor and isinstance(leaf, nn.Parameter)]
            if parameters and function_name(func) not in METADATA:
                self.pass_to(self._mail.place("", parameters, self.turn.holder), leaves)
        return super().__torch_function__(func, types, args, kwargs)

    def _run(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if not self.partial:
            return super()._run(name, func, args, kwargs, tensors)
        own = kwargs.get("generator")
        before = self._states(own) if (random := draws(func, name)) else ()
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


class _Turns:
    """Whose turn it is, and who has which value.

    Args:
        holder: the rank that has the first turn.
        rank: this rank.

    Attributes:
        holder: the rank that has the turn.
        begin: the number of calls before the turn.
        told: what the rank with the turn has told; ``None`` as long as it has not.
        homes: by number, the rank that has computed a tensor.
        known: by rank, the numbers of the values that it got with its turn.
        elsewhere: by number, the version of a tensor here when other ranks had the same value, and whether another
            tensor has its memory where it comes from.
    """

    def __init__(self, holder: int, rank: int) -> None:
        self.holder, self._rank = holder, rank
        self.begin = 0
        self.told: Crossing | None = None
        self.homes: dict[int, int] = {}
        self.known: dict[int, set[int]] = {}
        self.elsewhere: dict[int, tuple[int | None, bool]] = {}

    @property
    def mine(self) -> bool:
        """Whether this rank has the turn."""
        return self.holder == self._rank

    def check_changes(self, calls: Sequence[CallRecord], numbers: Numbers) -> None:
        """At the end of this rank's turn: a value that other ranks have has changed by a call alone that names it.

        Raises:
            CutError: another tensor with its memory has changed, or one on the rank that it came from would have to.
        """
        told = set(_left_by(calls[self.begin :]))
        for number, (version, shared) in [*self.elsewhere.items()]:
            tensor = numbers.find(number)
            if tensor is None or isinstance(tensor, Placeholder):
                del self.elsewhere[number]
            elif version_of(tensor) != version:
                if shared or number not in told:
                    raise CutError(
                        f"tensor {number}, {tuple(tensor.shape)}, is changed in place, another tensor shares its "
                        "memory, and they have been on different ranks.",
                        hint="Use the out-of-place form, or .clone() one of them.",
                    )
                del self.elsewhere[number]
                for known in self.known.values():
                    known.discard(number)

    def end(self, rank: int, calls: Sequence[CallRecord]) -> None:
        """The turn is over and another rank has the next one."""
        self.homes |= dict.fromkeys(_left_by(calls[self.begin :]), self.holder)
        self.holder, self.begin, self.told = rank, len(calls), None


def _left_by(calls: Sequence[CallRecord]) -> Iterator[int]:
    """The numbers of the tensors that calls have made or changed."""
    return (number for call in calls for number in call.numbers)
