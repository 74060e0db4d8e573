"""What runs of a step leave behind: attributes of the module, hooks, and what they take from sources of its own.

Every rank runs the user's step, and most runs end early. Those are undone: the next one, and the complete run on
another rank, begin with what was there before. What complete runs have changed is made on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_pipe.engine.first_batch.trial_runs import is_alone
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.contents import Change
from lightning_pipe.intercept.kept_state import in_several_pipes
from lightning_pipe.intercept.module_state import apply, name_of, portable
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.plain.own_sources import untouched
from lightning_pipe.plain.step_hooks import HooksOfBatch, StepHooks


class StepTraces:
    """Undoes what runs of steps do that end early, and has on all ranks what the complete ones have done.

    Args:
        pipeline: the module over the ranks.

    Attributes:
        hooks: what steps register on modules.
        of_layers: what steps set in layers.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        interceptor = pipeline.executor.stages.interceptor
        self._pipeline, self.of_layers = pipeline, interceptor.state
        self.of_layers.decide_around()
        self.hooks = StepHooks(pipeline.module, lambda: interceptor.in_module)

    def capture(self) -> Snapshot:
        """The attributes as they are now."""
        return Snapshot(self.of_layers.around)

    @contextmanager
    def undoing(
        self,
        micro_batches: int,
        hooks: HooksOfBatch,
        may_repeat: bool,
        before: Snapshot | None = None,
        remembered: Callable[[], AbstractContextManager[Mapping[int, Snapshot]]] = lambda: nullcontext({}),
    ) -> Iterator[None]:
        """Around a run of the step: its traces are removed if it ends early, or if it is not the first complete one.

        Args:
            micro_batches: how many the batch has.
            hooks: what runs for the batch register on modules.
            may_repeat: whether it may come back to the layers of an earlier stage, and end there on all ranks.
            before: the attributes before it, if they are known.
            remembered: the context of what else is to be undone.

        Raises:
            CutError: it changes an attribute, and no rank runs all micro-batches.
            RepeatedRunError: it has taken from a generator or an iterator of its own, and runs more than once.
        """
        pipeline = self._pipeline
        # recomputation runs a micro-batch again whose traces are there already
        again = is_recomputing()
        # a rank that holds the last stage alone completes every run, unless that comes back to an earlier stage
        complete = not (pipeline.ends_early or may_repeat or again)
        several = pipeline.family.pipes > 1 and pipeline.synchronous  # ranks complete micro-batches
        pipes = several and micro_batches > 1 and not again
        noting_hooks = self.hooks.noting(hooks, lambda: complete)
        taking = untouched(self.of_layers.around) if again or may_repeat or pipes else nullcontext()
        if complete:
            with noting_hooks, taking:
                yield
            return
        # what stands in the place of iterators is no change
        with taking, noting_hooks, remembered() as others:
            kept = before or self.capture()
            try:
                yield
                complete = not again
            finally:
                for change in kept.changes() if complete and pipes else ():  # which other ranks do not see
                    raise in_several_pipes(f"self.{name_of(change)}")
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
        changes, lost = ([], []) if before is None else portable([*before.changes(), *of_layers])
        if lost:
            raise CutError(
                f"the step sets `self.{lost[0]}` to something that cannot be pickled, so other ranks cannot have it.",
                hint="Set it outside of the step, on all ranks; under a Trainer in a hook such as setup or "
                "on_train_batch_start.",
            )
        return changes

    def adopt(self, changes: Sequence[Sequence[Change]], before: Snapshot | None) -> None:
        """Have on this rank what the step has changed on the ranks that complete it.

        Args:
            changes: of all these ranks.
            before: this rank's attributes before the steps; ``None`` if it completes none.
        """
        for of_rank in changes if before is None or len(changes) > 1 else ():
            apply(of_rank, self.of_layers)
