"""A schedule prepared for being timed with many costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import Number, Result, play, remote_need, result_of
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.schedules.passes.lower import put_off
from lightning_pipe.simulate.costs import Costs
from lightning_pipe.simulate.discrete import run
from lightning_pipe.simulate.simulator import any_cost, ends

_WEIGHT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_NOWHERE = -1


class Compiled:
    """The actions of all ranks in one order in which each comes after what it needs.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.kinds: dict[tuple[Kind, int], int] = {}
        self.steps: list[tuple[int, int, int, int]] = []
        """For each action: its rank, its kind, and of what it needs the number and, from another rank, the kind."""
        self._order()

    def _order(self) -> None:
        actions = self.schedule.actions
        done: dict[Result, tuple[int, int, int]] = {}
        waiting: dict[Result, int] = {}
        reached = [0] * len(actions)
        ready = list(range(len(actions)))
        while ready:
            rank = ready.pop()
            for action in actions[rank][reached[rank] :]:
                need, producer, sent = remote_need(action, self.schedule.stages), _NOWHERE, _NOWHERE
                if need is not None:
                    if need not in done:
                        waiting[need] = rank
                        break
                    producer, kind, place = done[need]
                    sent = _NOWHERE if place == rank else kind
                reached[rank] += 1
                kind = self.kinds.setdefault((action.kind, action.stage), len(self.kinds))
                result = result_of(action)
                if result is not None:
                    done[result] = len(self.steps), kind, rank
                    if result in waiting:
                        ready.append(waiting.pop(result))
                self.steps.append((rank, kind, producer, sent))

    @cached_property
    def _put_off(self) -> frozenset[int]:
        return put_off(self.schedule, play(self.schedule))

    def time(self, costs: Costs) -> Number:
        """The makespan of `simulate`.

        Args:
            costs: times; plain messages (``occupies="neither"``, ``links="free"``, no ``overhead``) are fast.
        """
        if costs.occupies != "neither" or costs.links != "free" or costs.overhead:
            played = run(self.schedule, costs).played
            over: Sequence[Number] = [timed[-1].end if timed else 0 for timed in played]
            finished = {
                (action.stage, rank): end
                for rank, row in enumerate(played)
                for action, _, end in row
                if action.kind in _WEIGHT_GRADIENT
            }
        else:
            over, finished = self._played(costs)
        if not self.schedule.synchronous or self.schedule.forward_only:
            return max(over)
        complete: dict[int, Number] = {}
        if any_cost(costs.reduce):
            for (stage, _), end in finished.items():
                complete[stage] = max(end, complete.get(stage, end))
        late = self._put_off if complete else frozenset()
        return max([*over, *(event.end for event in ends(self.schedule, costs, over, complete, late))])

    def _played(self, costs: Costs) -> tuple[list[Number], dict[tuple[int, int], Number]]:
        samples = [Action(kind, stage, 0) for kind, stage in self.kinds]
        durations = [costs.duration(action) for action in samples]
        crossing = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
        transfers = [costs.transfer(action) if action.kind in crossing else 0 for action in samples]
        free: list[Number] = [0] * self.schedule.ranks
        done: list[Number] = [0] * len(self.steps)
        latest: dict[tuple[int, int], Number] = {}
        for number, (rank, kind, producer, sent) in enumerate(self.steps):
            start = free[rank]
            if producer >= 0:
                arrives = done[producer] if sent < 0 else done[producer] + transfers[sent]
                if arrives > start:
                    start = arrives
            free[rank] = done[number] = start + durations[kind]
            latest[kind, rank] = free[rank]
        stages = [stage for _, stage in self.kinds]
        weights = [kind in _WEIGHT_GRADIENT for kind, _ in self.kinds]
        return free, {(stages[kind], rank): end for (kind, rank), end in latest.items() if weights[kind]}
