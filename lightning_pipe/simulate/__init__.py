"""What a schedule costs in time and memory, and timelines, simulated or measured, with their drawings.

The module can be called: ``lightning_pipe.simulate(schedule, costs)`` is :func:`lightning_pipe.simulate.simulate`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.simulate.comparison import Comparison, compare, table
from lightning_pipe.simulate.costs import Costs
from lightning_pipe.simulate.link import Link
from lightning_pipe.simulate.memory import Held, Memory, memory_over_time, peak
from lightning_pipe.simulate.simulator import simulate
from lightning_pipe.simulate.timeline import Event, Timeline

__all__ = [
    "Comparison",
    "Costs",
    "Event",
    "Held",
    "Link",
    "Memory",
    "Timeline",
    "compare",
    "memory_over_time",
    "peak",
    "simulate",
    "table",
]


class _CallableModule(ModuleType):
    def __call__(self, schedule: Schedule, costs: Costs | None = None) -> Timeline:
        return simulate(schedule, costs)


sys.modules[__name__].__class__ = _CallableModule
