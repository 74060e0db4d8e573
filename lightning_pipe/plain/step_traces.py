"""What runs of a step leave behind: attributes of the module, hooks, and what they take from sources of its own.

Every rank runs the user's step, and most runs end early. Those are undone: the next one, and the complete run on
another rank, begin with what was there before. What complete runs have changed is made on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pipe.engine.first_batch.trial_runs import is_alone
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import in_several_pipes
from lightning_pipe.intercept.module_state import apply, check_portable
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.snapshot import Change, Snapshot
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.patches import all_replaced
from lightning_pipe.plain.own_sources import untouched

_KINDS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)
Registered = tuple[RemovableHandle, Callable[[], RemovableHandle]]
"""A hook that a step has registered: removes it, registers it anew."""


class TracesOfBatch:
    """What the runs of one batch's step have left on this rank.

    Args:
        micro_batches: how many the batch has.
        may_repeat: whether the step may come back to the layers of an earlier stage, and end there on all ranks.

    Attributes:
        micro_batches, may_repeat: as given.
        before: what was there before the complete ones, of a step that may have to run again in another way.
    """

    def __init__(self, micro_batches: int, *, may_repeat: bool = False) -> None:
        self.micro_batches, self.may_repeat = micro_batches, may_repeat
        self.before: list[Snapshot] = []
        self._hooks: list[list[Registered]] = []  # of complete runs
        self._removed: list[Registered] = []

    def end_run(self, hooks: list[Registered], *, complete: bool) -> None:
        """A run is over; what it has registered is removed if it does not count."""
        if complete:
            self._hooks.append(hooks)
            return
        self._removed = hooks
        for handle, _ in hooks:
            handle.remove()

    def undo(self) -> None:
        """The batch runs again: what complete runs have done does not count."""
        for before in reversed(self.before):
            before.undo()
        for handle, _ in (each for hooks in self._hooks for each in hooks):
            handle.remove()
        self.before, self._hooks = [], []

    def left(self) -> tuple[int, ...]:
        """The hooks that are still there, by their places among all that the run has registered."""
        found = (
            tuple(place for place, (handle, _) in enumerate(hooks) if handle.id in (handle.hooks_dict_ref() or ()))
            for hooks in self._hooks
        )
        return next(filter(None, found), ())

    def put_back(self, left: Sequence[int]) -> None:
        """Have the hooks on this rank that the complete run has left on another one.

        Args:
            left: from `left` there.

        Raises:
            CutError: this rank's runs ended before the step had registered them.
        """
        if not left or self._hooks:
            return
        if left[-1] >= len(self._removed):
            raise CutError(
                "the step registers a hook on a module behind a cut, for later batches: stages before it never come "
                "there.",
                hint="Register hooks that stay in setup or configure_model.",
            )
        registers = [self._removed[place][1] for place in left]
        self._hooks.append([(register(), register) for register in registers])  # once, whichever rank tells again


class StepHooks:
    """Notes the hooks that steps register on modules: removed behind a run that ends early, alike on all ranks.

    A step may look into layers, and models of Hugging Face register hooks when attentions are first asked for::

        def validation_step(self, batch, batch_idx):
            handle = self.model[0].register_forward_hook(keep)
            out = self.model(batch)     # all ranks but the last end their run of the step in here,
            handle.remove()             # and never come to this

    What a layer registers in its own forward pass stays.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {id(part) for part in module.modules()}
        self._noted: list[Registered] | None = None

    def installed(self) -> AbstractContextManager[None]:
        """Around runs of steps: see what is registered on modules."""
        return all_replaced([(nn.Module, kind, self._noting(getattr(nn.Module, kind))) for kind in _KINDS])

    def _noting(self, register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> RemovableHandle:
            handle = register(module, *args, **kwargs)
            inside = (run := under_way.run) is not None and run.surroundings.inside
            if self._noted is not None and id(module) in self._modules and not inside:
                self._noted.append((handle, partial(register, module, *args, **kwargs)))
            return handle

        return noting

    def noting(self, end_run: Callable[[list[Registered]], None]) -> StepHooks:
        """Around a run of the step; ``end_run`` is called behind it with what it has registered, if anything."""
        self._end_run = end_run
        return self

    def __enter__(self) -> None:
        self._noted = []

    def __exit__(self, *_: object) -> None:
        noted, self._noted = self._noted, None
        if noted:
            self._end_run(noted)
        del self._end_run  # it keeps what the batch has left


class StepTraces:
    """Undoes what runs of steps do that end early, and has on all ranks what the complete ones have done.

    Args:
        pipeline: the module over the ranks.

    Attributes:
        hooks: what steps register on modules.
        of_layers: what steps set in layers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.of_layers = pipeline, pipeline.executor.stages.interceptor.state
        self.hooks = StepHooks(pipeline.module)

    def capture(self) -> Snapshot:
        """The attributes as they are now."""
        return Snapshot(self.of_layers.around)

    def run_or_undo(
        self,
        run: Callable[[], Any],
        traces: TracesOfBatch,
        before: Snapshot | None,
        remembered: Callable[[], AbstractContextManager[Mapping[int, Snapshot]]],
    ) -> Any:
        """Run the step; its traces are removed if the run ends early, or if it is not the first complete one.

        Args:
            run: runs it.
            traces: of the runs for the batch.
            before: the attributes before it, if they are known.
            remembered: the context of what else is to be undone.

        Raises:
            CutError: it changes an attribute, and no rank runs all micro-batches.
            RepeatedRunError: it has taken from a generator or an iterator of its own, and runs more than once.
        """
        pipeline, may_repeat = self._pipeline, traces.may_repeat
        # recomputation runs a micro-batch again whose traces are there already
        again = is_recomputing()
        # a rank that holds the last stage alone completes every run, unless that comes back to an earlier stage
        complete = not (pipeline.ends_early or may_repeat or again)
        several_complete = pipeline.family.pipes > 1 and pipeline.synchronous and traces.micro_batches > 1 and not again
        noting_hooks = self.hooks.noting(lambda hooks: traces.end_run(hooks, complete=complete))
        taking = untouched(self.of_layers.around) if again or may_repeat or several_complete else nullcontext()
        with taking, noting_hooks:  # in this order: what stands in the place of iterators is no change
            if complete:
                return run()
            with remembered() as others:
                kept = before or self.capture()
                try:
                    result = run()
                    complete = not again
                    traces.before += [kept, *others.values()] if may_repeat else ()
                    return result
                finally:
                    for change in kept.changes() if complete and several_complete else ():  # unseen by other ranks
                        raise in_several_pipes(change.written)
                    if not complete:
                        # (a recomputation is put back once more around it, and its graph holds the tensors of now)
                        kept.undo(for_now=again and not is_alone())
                        for states in others.values():
                            states.undo()

    def changes(self, before: Snapshot | None) -> list[Change]:
        """What steps have changed, for other ranks.

        Args:
            before: the attributes before the steps; ``None``: no other rank needs what they have changed here.

        Raises:
            CutError: an attribute cannot be sent.
        """
        of_layers = self.of_layers.take()
        changes = [] if before is None else [*before.changes(), *of_layers]
        check_portable(changes)
        return changes

    def adopt(self, changes: Sequence[Sequence[Change]], before: Snapshot | None) -> None:
        """Have on this rank what the step has changed on the ranks that complete it.

        Args:
            changes: of all these ranks.
            before: this rank's attributes before the steps; ``None`` if it completes none.
        """
        for of_rank in changes if before is None or len(changes) > 1 else ():
            apply(of_rank, self.of_layers)
