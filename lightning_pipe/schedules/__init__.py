"""Pipeline schedules as data."""

from lightning_pipe.schedules.ir import Action, Kind, Placement, Schedule

__all__ = ["Action", "Kind", "Placement", "Schedule"]
