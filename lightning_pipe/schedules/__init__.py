"""Pipeline schedules as data: build them by name or class, check, fold, lower, read and write them."""

from lightning_pipe.schedules.csv_format import read_csv, write_csv
from lightning_pipe.schedules.family import Family
from lightning_pipe.schedules.forward_only import forward_only
from lightning_pipe.schedules.gpipe import GPipe
from lightning_pipe.schedules.interleaved import Interleaved
from lightning_pipe.schedules.ir import Action, Kind, Placement, Schedule
from lightning_pipe.schedules.lower import lower
from lightning_pipe.schedules.naive import Naive
from lightning_pipe.schedules.one_f_one_b import OneFOneB
from lightning_pipe.schedules.registry import get, names, register

register("naive")(Naive)
register("gpipe")(GPipe)
register("1f1b")(OneFOneB)
register("interleaved")(Interleaved)

__all__ = [
    "Action",
    "Family",
    "GPipe",
    "Interleaved",
    "Kind",
    "Naive",
    "OneFOneB",
    "Placement",
    "Schedule",
    "forward_only",
    "get",
    "lower",
    "names",
    "read_csv",
    "register",
    "write_csv",
]
