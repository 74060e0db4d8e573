"""Chimera's performance model, beside the simulator that counts actions."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.dependencies import Number
from lightning_pipe.schedules.families.chimera import Chimera
from lightning_pipe.simulate.costs import Costs
from lightning_pipe.simulate.simulator import simulate


def chimera_time(
    depth: int,
    micro_batches: int,
    forward: Number,
    backward: Number,
    p2p: Number = 0,
    all_reduce: Number | Sequence[Number] = 0,
) -> Number:
    """Time of an iteration of Chimera by its performance model, Eq. (1) of Li and Hoefler, SC'21, section 3.4.

    ::

        T = (F_t + Comm_p2p) C_f + (B_t + Comm_p2p) C_b + max over i of Comm_unoverlapped(i)

    ``C_f`` and ``C_b`` are the numbers of forward and backward passes on the critical path: 6 and 10 for D = N = 6.

    Args:
        depth: D, stages of each of the two pipelines.
        micro_batches: N, of one worker in an iteration; a multiple of D (pipelines concatenated directly).
        forward: F_t, forward pass of a micro-batch on a stage.
        backward: B_t, its backward pass: 2 F_t, or 3 F_t with recomputation.
        p2p: Comm_p2p = alpha + beta L for the L bytes between two stages, see `Link.message`.
        all_reduce: Comm_allreduce(r) of each stage's gradients over its r = 2 W replicas, see `Link.all_reduce`;
            one number for all stages or one per stage.

    Returns:
        T, in the unit of the times.

    Raises:
        ScheduleError: ``depth`` is odd, or ``micro_batches`` no multiple of it.

    Example:
        >>> chimera_time(depth=6, micro_batches=6, forward=1, backward=2)
        26
    """
    forwards, backwards = chimera_critical_path(depth, micro_batches)
    path = (forward + p2p) * forwards + (backward + p2p) * backwards
    sums = list(all_reduce) if isinstance(all_reduce, Sequence) else [all_reduce] * depth
    if not any(sums):
        return path
    return path + max(_unoverlapped(depth, micro_batches, forward + p2p, backward + p2p, sums))


def chimera_critical_path(depth: int, micro_batches: int) -> tuple[int, int]:
    """C_f and C_b of Eq. (1): forward and backward passes on the critical path of N = K D micro-batches.

    Example:
        >>> chimera_critical_path(6, 6)
        (6, 10)
    """
    if depth % 2 or depth < 2 or micro_batches < 1 or micro_batches % depth:
        raise ScheduleError(
            f"Chimera's model is for an even number of stages and a multiple of it as micro-batches, "
            f"not for {depth} stages and {micro_batches} micro-batches.",
            hint="Simulate other numbers.",
        )
    units = micro_batches // depth
    return depth - 2 + 2 * units, 2 * units * (depth - 1)


def _unoverlapped(
    depth: int, micro_batches: int, forward: Number, backward: Number, all_reduce: Sequence[Number]
) -> list[Number]:
    """For every worker i what its two reductions need beyond the free time behind their stage's last pass.

    The free regions of Fig. 6: the stage that is done first reduces in the bubbles after it, (a) and (b); both
    reduce in what is left at the end, (c).
    """
    schedule = Chimera().build(depth, micro_batches)
    timeline = simulate(schedule, Costs(forward, backward))
    result = []
    for row in timeline.compute:
        last = {event.stage: event.end for event in row if event.kind is Kind.BACKWARD}
        over = max(last.values())
        first = min(last, key=lambda stage: (last[stage], -stage))
        busy = sum(event.end - event.start for event in row if event.start >= last[first])
        bubbles = over - last[first] - busy
        left = max(0, all_reduce[first] - bubbles)
        rest = sum(all_reduce[stage] for stage in last if stage != first)
        result.append(max(0, left + rest - (timeline.makespan - over)))
    return result
