"""What a schedule costs in time and memory, and timelines, simulated or measured, with their drawings."""

from lightning_pipe.simulate.costs import Costs
from lightning_pipe.simulate.simulator import simulate
from lightning_pipe.simulate.timeline import Event, Timeline

__all__ = ["Costs", "Event", "Timeline", "simulate"]
