"""Costs that a run goes by were measured with some input: whether the run's own has the same shapes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipe.engine.containers import signature
from lightning_pipe.profiling.measure import shapes_of_a_sample
from lightning_pipe.trainer.data.micro_batches import MicroBatches


@dataclass(frozen=True)
class MeasuredShapes:
    """The input that costs were measured with; ``None``: nothing was measured, or it is not known.

    Args:
        schedule: a sample of the input of the profile that the schedule was chosen by, as `shapes_of_a_sample` has it.
        balance: the `signature` of a micro-batch of those costs that the stages were balanced by.
    """

    schedule: str | None = None
    balance: str | None = None

    def notes(self, micro_batches: MicroBatches) -> tuple[str, ...]:
        """What the user is to know, for the plan.

        Args:
            micro_batches: the first batch of the run.
        """
        found = []
        part = micro_batches.parts[0]
        if self.schedule is not None and (now := shapes_of_a_sample(part)) != self.schedule:
            found.append(
                f"the schedule was chosen by a profile of samples {self.schedule}; those of this batch are {now}: "
                "measure again with `lightning-pipe profile`"
            )
        if self.balance is not None and str(signature(part)) != self.balance:
            found.append(
                "the stages were balanced by costs of micro-batches of other shapes than this batch has: a run that "
                "is started again is balanced by this batch's"
            )
        return tuple(found)
