"""Orders of actions drawn at random: any in which each action comes behind those that it needs."""

from __future__ import annotations

from random import Random

from lightning_pipe.schedules.action import Action, Kind, Placement


def random_order(
    placement: Placement, ranks: int, stages: int, micro_batches: int, random: Random
) -> list[list[Action]]:
    """For every rank its actions, as they come one after the other in one process; micro-batches take pipes in turn."""
    pipes = len(placement) // stages
    ready = [Action(Kind.FORWARD, 0, index, index % pipes) for index in range(micro_batches)]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        orders[placement[action.pipe, action.stage]].append(action)
        if action.kind is Kind.FORWARD and action.stage == stages - 1:
            ready.append(action._replace(kind=Kind.BACKWARD))
        elif action.kind is Kind.FORWARD or action.stage > 0:
            ready.append(action._replace(stage=action.stage + (1 if action.kind is Kind.FORWARD else -1)))
    return orders
