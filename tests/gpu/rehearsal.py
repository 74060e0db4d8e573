"""``python -m tests.gpu.rehearsal [--write] [PARTS…]``: the parts of ``make gpu`` on the fake device, and their table.

Nothing of it is a result of a GPU: it shows that the parts run there to their end, and that devices, streams, memory
and messages are used as CUDA and NCCL want it. ``results/gpu.json`` is not touched.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Finding
from tests.gpu.page import between
from tests.gpu.rows import is_open
from tests.gpu.runner import PARTS, ROOT, Part, chosen, run_part
from tests.support.fake_cuda.build import obstacle
from tests.support.fake_cuda.environment import environment, hazards

DEVICES = 2
MEASURES = ("host_time", "peak_memory", "largest_transformer", "largest_amoebanet", "throughput")
"""Parts that measure: here in small sizes, to see that they end. Their figures mean nothing."""
NOT_REHEARSABLE = {
    "recurrent, 1f1b-s4-m3-d1": "_thnn_fused_lstm_cell",
    "compiled layers": "Triton",
    "host_time": "CUPTI",
}
"""Rows that need a kernel, or a tool, which a torch for the CPU lacks."""
_PAGE = ROOT / "docs" / "developing.md"


def rehearsed(part: Part, *, small: bool = False, protects: bool = False) -> list[Finding]:
    """The rows of one part on the fake device; a hazard, or an end before its time, is a row as well."""
    with tempfile.TemporaryDirectory() as folder:
        own = environment(DEVICES, protects=protects, record=Path(folder))
        kept = dict(os.environ)
        os.environ.update(own)
        try:
            small = small or part.name in MEASURES
            status, rows = run_part(part, devices=DEVICES, small=small)
        finally:
            os.environ.clear()
            os.environ.update(kept)
        rows += [Finding("pinned memory", each, "no hazard", False) for each in hazards(Path(folder))]
        return rows if status == "done" else [*rows, Finding(part.name, status, "done", False)]


def verdict(row: Finding) -> str:
    """What a row of a rehearsal says: "equal", "ran", "not run", "not rehearsable", or what is wrong."""
    kernel = NOT_REHEARSABLE.get(row.name)
    if row.reached is False and kernel is not None and (kernel in row.value or row.value.startswith("failed")):
        return "not rehearsable"
    if row.reached is False:
        return f"WRONG: {row.value}"
    if is_open(row):
        return "not run"
    return "ran" if row.reached is None else "equal"


def table(found: Mapping[str, Sequence[Finding]]) -> str:
    """A line for each part: how many rows have which verdict, and which rows are not rehearsable."""
    lines = ["| part | rehearsed, on no GPU | not rehearsable: what a CPU build lacks |", "|---|---|---|"]
    for name, rows in found.items():
        verdicts = [verdict(row) for row in rows]
        counts = {each: verdicts.count(each) for each in dict.fromkeys(verdicts) if each != "not rehearsable"}
        words = ", ".join(f"{count} {each}" for each, count in counts.items())
        missing = [
            f"{row.name.split('::')[-1].split(',')[0]}: `{NOT_REHEARSABLE[row.name]}`"
            for row, each in zip(rows, verdicts, strict=True)
            if each == "not rehearsable"
        ]
        lines.append(f"| `{name}` | {words} | {', '.join(missing)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the named parts, or all; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.rehearsal", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--write", action="store_true", help=f"put the table into {_PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    reason = obstacle()
    if reason is not None:
        print(f"NOT REHEARSED: {reason}")
        return 1
    start = time.monotonic()
    found: dict[str, list[Finding]] = {}
    for part in chosen(given.parts):
        found[part.name] = rehearsed(part)
    if not given.parts:
        (zoo,) = chosen(["one_rank"])
        (messages,) = chosen(["nccl"])
        rows = [*rehearsed(zoo, small=True, protects=True), *rehearsed(messages, small=True, protects=True)]
        found["one_rank, nccl in protected memory"] = rows
    text = table(found)
    print(f"\nREHEARSED on the fake device, which is no GPU, in {time.monotonic() - start:.0f} s\n\n{text}")
    if given.write:
        _PAGE.write_text(between(_PAGE.read_text(), "rehearsed", text))
    wrong: list[Any] = [row for rows in found.values() for row in rows if verdict(row).startswith("WRONG")]
    for row in wrong:
        print(row)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
