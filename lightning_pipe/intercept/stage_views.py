"""What each stage sees of the layers of others, where one rank has several stages.

All stages run the code of the step before their layers, once for each micro-batch. Where that changes a layer by its
own value, the next run of the same stage goes on from there, as one device does, while the layer itself has what the
stage has left that runs it::

    layer.scale *= 0.9        stage 0 sees 1.0, 0.9, 0.81 ... and runs the layer
                              stage 2, on the same rank, sees 1.0, 0.9, 0.81 ... for the same micro-batches

With several pipes no stage of a rank runs all micro-batches. There they go on from what the rank has run before, which
shows what changes by its own value: that cannot be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_pipe.intercept.contents import Change
from lightning_pipe.intercept.layer_calls import RunCache, by_own_value, names_in, snapshot_of
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.stage_run import StageRun

_ANY = -1
"""In the place of a stage."""


class StageViews:
    """What the stages of this rank have left in attributes that the step changes, and no call.

    Args:
        cache: knows these attributes.
        computing: gives all parts of layers and outside modules.

    Attributes:
        buffers: those that the step changes in place, by the ``id`` of the module and the name.
    """

    def __init__(self, cache: RunCache, computing: Callable[[], Iterable[nn.Module]]) -> None:
        self._cache, self._computing = cache, computing
        # by stage, what its last run has left; where several pipes run a batch, that of any stage
        self._views: dict[int, Snapshot] = {}
        # what the stages begin with that have not run yet
        self._start: list[Snapshot] = []
        self._seen_first: list[list[Snapshot]] = []
        self.buffers: set[tuple[int, str]] = set()

    def _in_pipes(self, run: StageRun) -> bool:
        """Whether other micro-batches of the batch take another way."""
        reads = self._cache.reads
        return not (reads is None or reads.course.one_pipe or run.tracker.alone)

    def clear(self) -> None:
        """No batch is under way: all stages see what the modules have."""
        self._views.clear()
        self._start.clear()

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Around a batch during which no other one is under way."""
        self.clear()
        try:
            yield
        finally:
            self.clear()

    def note_set(self, part: nn.Module, name: str) -> None:
        """The step is about to set an attribute."""
        if self._cache.note_keeper(part, name):
            for found in self._seen_first:
                found.append(snapshot_of({id(part): (part, {name})}))

    def note_changed_in_place(self, part: nn.Module, name: str) -> None:
        """The step is about to change a buffer in place."""
        self.buffers.add((id(part), name))
        self.note_set(part, name)

    @contextmanager
    def seen_first(self) -> Iterator[list[Snapshot]]:
        """Around a run: what attributes were that no run has set before."""
        found: list[Snapshot] = []
        self._seen_first.append(found)
        try:
            yield found
        finally:
            self._seen_first.remove(found)

    def forget(self, part: nn.Module, name: str) -> None:
        """All stages see of an attribute what the module has."""
        key = str(id(part))
        self._views = {stage: view.without(key, name) for stage, view in self._views.items()}
        self._start = [start.without(key, name) for start in self._start]

    @contextmanager
    def seen_by(self, stage: int | None) -> Iterator[None]:
        """The attributes are meanwhile what the next run of a stage sees."""
        kept = self._cache.kept()
        if stage is not None:
            self._show(stage)
        try:
            yield
        finally:
            if stage is not None:
                kept.undo()

    def _show(self, stage: int) -> bool:
        """Let the attributes be what the next run of a stage sees. Returns whether there are any."""
        view, own = self._views.get(stage, self._views.get(_ANY)), self._cache.of_steps()
        for each in (self._start if view is None else [view]) if own else ():
            each.narrowed(names_in(own)).undo()
        return bool(own)

    @contextmanager
    def apart(self, run: StageRun) -> Iterator[None]:
        """Around a run of one of several stages of this rank: what other stages keep is put back.

        Raises:
            CutError: with several pipes, the step changes a list, a dictionary or an object by its own value.
        """
        cache, stage = self._cache, run.stage.stage
        known = (stage, run.training) in cache.looked
        cache.looked.add((stage, run.training))
        everything = None if known else [*self._computing()]
        before = cache.kept(everything)
        if not self._start:
            self._start.append(before.narrowed())
        seen = cache.kept(everything) if self._show(stage) else before
        with self.seen_first() as new:
            try:
                yield
                self._look(run, seen, everything or ())
            finally:
                ran = [str(id(part)) for module in run.layer_calls.ran for part in module.modules()]
                self._start += new
                self._leave(run, ran)
                for former in (*new, before):
                    of_others = former.narrowed()
                    of_others.forget(ran)
                    of_others.undo()

    def _leave(self, run: StageRun, ran: Iterable[str]) -> None:
        """At the end of a run: the next one of its stage goes on from here."""
        pipes = self._in_pipes(run)
        key = _ANY if pipes else run.stage.stage
        self._views.pop(key, None)
        left = {} if run.repeats else self._cache.of_steps()
        if left:
            self._views[key] = snapshot_of(left)
            self._views[key].forget(() if pipes else ran)

    def _look(self, run: StageRun, seen: Snapshot, everything: Iterable[nn.Module]) -> None:
        """At the end of a run: what has the step changed in place?"""
        cache = self._cache
        if not cache.keepers and not everything:
            return
        changes = seen.changes()
        if everything:
            cache.note_changes(changes, everything)
        own = cache.of_steps()
        for key, name in sorted({_root(change) for change in changes if _is_in_place(change)}):
            if key not in own or name not in own[key][1]:
                continue
            part, is_buffer = own[key][0], name in own[key][0]._buffers
            # buffers are set, too: that has been seen
            if is_buffer and (key, name) not in self.buffers:
                continue
            if self._in_pipes(run) and self._views and cache.reads is not None:
                raise by_own_value(cache.reads.written(part, name))
            if run.stage.last and not run.repeats and cache.writes is not None and not is_buffer:
                cache.writes.by_step(part, name, behind=False)


def _root(change: Change) -> tuple[int, str]:
    module, (_, name), *inner = change.path
    return int(module), str(inner[0][1] if name == "_buffers" and inner else name)


def _is_in_place(change: Change) -> bool:
    """Whether what an attribute refers to has changed, and not the attribute."""
    return len(change.path) > 2 or change.kind in ("fill", "append")
