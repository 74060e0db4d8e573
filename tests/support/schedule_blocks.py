"""A simulation in which several actions count as one: their results appear together, at the end of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipe.schedules import Action, Schedule
from lightning_pipe.schedules.dependencies import Number, remote_need, result_of
from lightning_pipe.simulate import Costs

Block = list[Action]


def blocks_of(schedule: Schedule, joins: Callable[[int, int, Action, Action], bool]) -> list[list[Block]]:
    """Every rank's actions, those joined that ``joins(rank, index of the second, first, second)`` says."""
    ranks = []
    for rank, order in enumerate(schedule.actions):
        blocks: list[Block] = []
        for index, action in enumerate(order):
            if blocks and len(blocks[-1]) == 1 and joins(rank, index, blocks[-1][0], action):
                blocks[-1].append(action)
            else:
                blocks.append([action])
        ranks.append(blocks)
    return ranks


def play_blocks(schedule: Schedule, ranks: Sequence[Sequence[Block]], costs: Costs) -> tuple[Number, list[Number]]:
    """The makespan and every rank's idle time inside its own span."""
    ends: dict[object, Number] = {}
    position, free, idle = ([0] * len(ranks) for _ in range(3))
    moved = True
    while moved:
        moved = False
        for rank, blocks in enumerate(ranks):
            while position[rank] < len(blocks):
                block = blocks[position[rank]]
                needs = {remote_need(action, schedule.stages) for action in block} - {None}
                needs -= {result_of(action) for action in block}
                if not needs <= ends.keys():
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                idle[rank] += start - free[rank] if position[rank] else 0
                free[rank] = start + sum(costs.duration(action) for action in block)
                ends.update((result_of(action), free[rank]) for action in block if result_of(action))
                position[rank] += 1
                moved = True
    assert all(at == len(blocks) for at, blocks in zip(position, ranks, strict=True))
    return max(free), idle
