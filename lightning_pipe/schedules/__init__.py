"""Pipeline schedules as data: build them by name or class, check, lower, read and write them."""

from lightning_pipe.schedules.action import Action, Kind, Placement
from lightning_pipe.schedules.asynchronous.pipedream import PipeDream, PipeDream2BW
from lightning_pipe.schedules.asynchronous.stream import Stream, stream
from lightning_pipe.schedules.csv_format import read_csv, write_csv
from lightning_pipe.schedules.families.bitpipe import BitPipe
from lightning_pipe.schedules.families.chimera import Chimera
from lightning_pipe.schedules.families.dual_pipe import DualPipe, DualPipeV
from lightning_pipe.schedules.families.gpipe import GPipe, LoopedBFS
from lightning_pipe.schedules.families.interleaved import Interleaved
from lightning_pipe.schedules.families.naive import GEMS, Naive
from lightning_pipe.schedules.families.one_f_one_b import OneFOneB
from lightning_pipe.schedules.families.zero_bubble import InterleavedZeroBubble, ZeroBubble
from lightning_pipe.schedules.family import Family
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.schedules.passes.lower import lower
from lightning_pipe.schedules.passes.recompute import with_recompute
from lightning_pipe.schedules.registry import get, names, register

for _family in (
    *(Naive, GPipe, OneFOneB, Interleaved, LoopedBFS, ZeroBubble, InterleavedZeroBubble),
    *(DualPipe, DualPipeV, Chimera, BitPipe, GEMS, PipeDream, PipeDream2BW),
):
    register(_family.name)(_family)

__all__ = [
    "GEMS",
    "Action",
    "BitPipe",
    "Chimera",
    "DualPipe",
    "DualPipeV",
    "Family",
    "GPipe",
    "Interleaved",
    "InterleavedZeroBubble",
    "Kind",
    "LoopedBFS",
    "Naive",
    "OneFOneB",
    "PipeDream",
    "PipeDream2BW",
    "Placement",
    "Schedule",
    "Stream",
    "ZeroBubble",
    "get",
    "lower",
    "names",
    "read_csv",
    "register",
    "stream",
    "with_recompute",
    "write_csv",
]
