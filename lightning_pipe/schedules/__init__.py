"""Pipeline schedules as data: build them by name or class, check, fold, lower, read and write them."""

from lightning_pipe.schedules.action import Action, Kind, Placement
from lightning_pipe.schedules.asynchronous.pipedream import PipeDream, PipeDream2BW
from lightning_pipe.schedules.asynchronous.stream import Stream, stream
from lightning_pipe.schedules.csv_format import read_csv, write_csv
from lightning_pipe.schedules.families.bitpipe import BitPipe
from lightning_pipe.schedules.families.chimera import Chimera
from lightning_pipe.schedules.families.dual_pipe import DualPipe
from lightning_pipe.schedules.families.dual_pipe_v import DualPipeV
from lightning_pipe.schedules.families.gems import GEMS
from lightning_pipe.schedules.families.gpipe import GPipe
from lightning_pipe.schedules.families.interleaved import Interleaved
from lightning_pipe.schedules.families.interleaved_zero_bubble import InterleavedZeroBubble
from lightning_pipe.schedules.families.looped_bfs import LoopedBFS
from lightning_pipe.schedules.families.naive import Naive
from lightning_pipe.schedules.families.one_f_one_b import OneFOneB
from lightning_pipe.schedules.families.zero_bubble import ZeroBubble
from lightning_pipe.schedules.family import Family
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.schedules.passes.forward_only import forward_only
from lightning_pipe.schedules.passes.lower import lower
from lightning_pipe.schedules.passes.recompute import with_recompute
from lightning_pipe.schedules.registry import get, names, register

register("naive")(Naive)
register("gpipe")(GPipe)
register("1f1b")(OneFOneB)
register("interleaved")(Interleaved)
register("looped_bfs")(LoopedBFS)
register("zero_bubble")(ZeroBubble)
register("interleaved_zero_bubble")(InterleavedZeroBubble)
register("dualpipe")(DualPipe)
register("dualpipev")(DualPipeV)
register("chimera")(Chimera)
register("bitpipe")(BitPipe)
register("gems")(GEMS)
register("pipedream")(PipeDream)
register("pipedream_2bw")(PipeDream2BW)

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
    "forward_only",
    "get",
    "lower",
    "names",
    "read_csv",
    "register",
    "stream",
    "with_recompute",
    "write_csv",
]
