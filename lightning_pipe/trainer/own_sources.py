"""What a step draws from that is its module's own: random generators and iterators which are attributes.

Each run of a step takes from them, and one device runs it once for each micro-batch. Runs that follow each other on
several stages would get different numbers or items::

    def training_step(self, batch):         micro-batch 0 on stage 0    on stage 1
        noise = next(self.noises)           item 0                      item 0
        h = self.layers(batch + noise)      ends at the cut             ends
        weight = next(self.weights)                                     item 0

Items are the same on both stages as long as each runs once for a batch, and takes the same number of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.trainer.module_state import Tracked, generator_state, set_generator_state

_HINT = (
    "Draw from the global generators of torch, NumPy or Python: their numbers depend on the step and the micro-batch "
    "alone. Let items come with the batch (CombinedLoader), or take them in a hook: on_train_batch_start."
)


class OwnSources:
    """What the runs of steps on a rank have taken so far.

    Args:
        tracked: the modules whose attributes count.

    Attributes:
        taken: by name how many items have been taken, or the state that a generator was in afterwards.
        evaluated: the names of those from which evaluations have taken something.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self.taken: dict[str, Any] = {}
        self.evaluated: set[str] = set()

    def run(self) -> SourcesOfRun:
        """Watch one run of a step from now on."""
        return SourcesOfRun(self._tracked, self.taken)

    @contextmanager
    def taking(self, taken: dict[str, Any], *, evaluating: bool) -> Iterator[None]:
        """Around a run of the step that counts; see `note`."""
        run = self.run()
        try:
            yield
        finally:
            self.note(run.end(), taken, evaluating=evaluating)

    def note(self, drawn: Mapping[str, Any], taken: dict[str, Any], *, evaluating: bool) -> None:
        """Note what a run has taken something from.

        Args:
            drawn: as `SourcesOfRun.end` returns it.
            taken: that of the runs for one batch, to be brought up to date.
            evaluating: whether it is an evaluation.
        """
        taken.update(drawn)
        self.taken.update(drawn)
        if evaluating:
            self.evaluated.update(drawn)

    def check_may_run_again(self, *, training: bool = False) -> None:
        """A batch has to run again.

        Args:
            training: whether it is a training batch.

        Raises:
            CutError: it has taken from what does not give the same again.
        """
        if found := self.taken if training else self.evaluated:
            raise _several_runs(min(found))


class SourcesOfRun:
    """Watches what one run of a step takes.

    Args:
        tracked: the modules whose attributes count.
        taken: that of `OwnSources`, to be brought up to date.
    """

    def __init__(self, tracked: Tracked, taken: dict[str, Any]) -> None:
        self._taken = taken
        self._generators = [(name, each, generator_state(each)) for name, each in tracked.generators()]
        self._iterators = [(name, _Watched(holder, iterator)) for name, holder, iterator in tracked.iterators()]

    def end(self) -> dict[str, Any]:
        """The run is over: what it has taken something from, as ``taken`` has it."""
        now = [(name, generator_state(each), state) for name, each, state in self._generators]
        found: dict[str, Any] = {name: state for name, state, before in now if state != before}
        items = {name: watched.end() for name, watched in self._iterators}
        return found | {name: self._taken.get(name, 0) + number for name, number in items.items() if number}

    def put_back(self) -> None:
        """Let the next run take the same again."""
        for _, generator, state in self._generators:
            if generator_state(generator) != state:
                set_generator_state(generator, state)
        for _, watched in self._iterators:
            watched.put_back()


class _Watched(Iterator[Any]):
    """Stands in the place of an iterator that is an attribute.

    Args:
        place: the mapping or list that holds it, and the key there.
        iterator: what is there.
    """

    def __init__(self, place: tuple[Any, Any], iterator: Iterator[Any]) -> None:
        self._place, self._iterator = place, iterator
        self._items: list[Any] = []
        self._ended = False
        holder, key = place
        holder[key] = self

    def __next__(self) -> Any:
        item = next(self._iterator)
        if not self._ended:
            self._items.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def end(self) -> int:
        """Put the iterator into its place again, unless the step has put another one there; the number of items."""
        self._ended = True
        self._replace(self, self._iterator)
        return len(self._items)

    def put_back(self) -> None:
        """Let the same items come again."""
        if self._items:
            self._replace(self._iterator, chain(self._items, self._iterator))

    def _replace(self, before: Iterator[Any], after: Iterator[Any]) -> None:
        holder, key = self._place
        with suppress(LookupError):
            if holder[key] is before:
                holder[key] = after


def check_one_run(name: str, pipeline: Pipeline, number: int, *, training: bool) -> None:
    """Raise if this rank runs code several times for a batch, in which it has taken from one of them.

    Args:
        name: of the attribute.
        pipeline: runs the steps.
        number: of micro-batches.
        training: whether it is a training step.

    Raises:
        CutError: names it, and what would let the code run once.
    """
    remedies = {
        "micro_batches=1" if training else "evaluation_micro_batches=1": number > 1,
        "one stage on each rank": len(pipeline.stages_here) > 1,
        "recompute='never'": training and pipeline.recompute != "never",
    }
    if pipeline.passes > 1:
        raise _several_runs(name)
    if any(remedies.values()):
        raise _several_runs(name, [remedy for remedy, helps in remedies.items() if helps])


def _several_runs(name: str, remedies: Sequence[str] = ()) -> CutError:
    return CutError(
        f"the step draws from a random generator or an iterator of its own, 'self.{name}', in code that runs several "
        "times for each batch: its runs would see different numbers.",
        hint=f"{_HINT} Or use {' with '.join(remedies)}." if remedies else _HINT,
    )


def check_one_pipe(taken: Iterable[Mapping[str, Any]]) -> None:
    """Raise if ranks that complete the steps of a part of the micro-batches each have taken something.

    Args:
        taken: what each of several such ranks has taken.

    Raises:
        CutError: names it.
    """
    names = {name for each in taken for name in each}
    if names:
        raise CutError(
            f"the step draws from a random generator or an iterator of its own, 'self.{min(names)}', and the schedule "
            "lets several ranks complete steps: each would see the numbers from the beginning.",
            hint=f"{_HINT} Or use a schedule with one pipe, such as 1f1b.",
        )


def check_alike(taken: Mapping[str, Any], elsewhere: Iterable[Mapping[str, Any]]) -> None:
    """Raise if this rank has taken other things than those that complete the step.

    Args:
        taken: what this rank's runs for a batch have taken.
        elsewhere: what the other ranks have taken.

    Raises:
        CutError: names it.
    """
    for name, each in taken.items():
        if any(other.get(name) != each for other in elsewhere):
            raise CutError(
                f"the step draws before a cut and behind it from 'self.{name}', a random generator or an iterator of "
                "its own: this stage does not run the code behind the cut, and would see different numbers.",
                hint=_HINT,
            )
