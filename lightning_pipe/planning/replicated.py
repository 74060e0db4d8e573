"""PipeDream's partitioning: stages of different sizes, each on as many ranks as its cost asks for."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from lightning_pipe.planning.cost_profile import CostProfile


class ReplicatedStages(NamedTuple):
    """A division in which stages may have several ranks.

    Args:
        layers: of every stage.
        replicas: ranks of every stage.
        seconds: that the slowest stage or message takes for one minibatch, on average: the time between minibatches.
    """

    layers: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: float


def replicated_stages(profile: CostProfile, ranks: int, samples: int) -> ReplicatedStages:
    """The division whose slowest stage is fastest, by dynamic programming.

    PipeDream (Narayanan et al., SOSP'19), section 3.1::

        A(j, m) = min over i < j and m' < m of max(A(i, m - m'), 2 C_i, T(i, j, m'))
        T(i, j, m) = max(sum of T_l, sum of W_l) / m

    A(j, m): the slowest stage of the best division of the first j layers over m ranks; C_i: the message over the
    boundary behind layer i; T_l: forward and backward time of layer l; W_l: the sum of its gradients over m ranks.

    Args:
        profile: the costs of the layers.
        ranks: to divide among the stages; all are used.
        samples: of a minibatch.

    Example:
        >>> from lightning_pipe.planning.cost_profile import LayerSizes, SizeCosts
        >>> costs = SizeCosts((1.0, 1.0, 2.0), (2.0, 2.0, 4.0), (1.0,) * 3, (0.0,) * 3, (0.0,) * 3)
        >>> profile = CostProfile("Net", tuple(LayerSizes(str(i), 1, 4) for i in range(3)), {1: costs})
        >>> replicated_stages(profile, ranks=3, samples=1)
        ReplicatedStages(layers=(3,), replicas=(3,), seconds=4.0)
    """
    at, count = profile.at(samples), len(profile.layers)
    times = [0.0, *accumulate(f + b for f, b in zip(at.forward, at.backward, strict=True))]
    sizes = [0.0, *accumulate(float(layer.parameter_bytes - layer.frozen_bytes) for layer in profile.layers)]
    beside = at.stage_forward + at.stage_backward + 2 * profile.overhead

    def stage(start: int, end: int, copies: int) -> float:
        reduction = float(profile.all_reduce.all_reduce(sizes[end] - sizes[start], copies))
        return max(times[end] - times[start] + beside, reduction) / copies

    crossing = [0.0, *(2 * float(profile.message.message(size)) for size in at.boundary_bytes)]
    # (end, ranks) -> the slowest, and of the last stage its start and copies; fewer stages first, if they are as fast
    best: dict[tuple[int, int], tuple[float, int, int]] = {}
    for number in range(1, ranks + 1):
        for end in range(1, count + 1):
            found = (stage(0, end, number), 0, number)
            for copies in range(1, number):
                for start in range(end - 1, 0, -1):
                    last = stage(start, end, copies)
                    if last >= found[0]:
                        break  # with more layers it only becomes slower
                    slowest = max(best[start, number - copies][0], crossing[start], last)
                    if slowest < found[0]:
                        found = slowest, start, copies
            best[end, number] = found
    layers: list[int] = []
    replicas: list[int] = []
    end, left = count, ranks
    while end:
        _, start, copies = best[end, left]
        layers.insert(0, end - start)
        replicas.insert(0, copies)
        end, left = start, left - copies
    return ReplicatedStages(tuple(layers), tuple(replicas), best[count, ranks][0])
