"""Runs parts one after the other, each in a process of its own with a time limit, and writes what they find at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Finding

ROOT = Path(__file__).parents[2]
FIRST_SECONDS = 9 * 60
"""The parts with `Part.first` are done within this time, whatever happens in them."""
INTERRUPTED = "interrupted"
_GRACE = 1.0


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Args:
        name: what `PARTS=` knows it by, and its module in `tests.gpu`.
        title: what it shows.
        limit: seconds after which it is ended; what it has found by then is kept.
        first: whether it belongs to those that a first, short loan of a machine is spent on.
    """

    name: str
    title: str
    limit: float
    first: bool = False


PARTS = (
    Part("marked", "the tests that are marked gpu", 100, first=True),
    Part("one_rank", "several stages on one device equal the plain module, in float64", 100, first=True),
    Part(
        "shared_device", "two processes on one device, over Gloo with pinned memory, equal one device", 90, first=True
    ),
    Part("delays", "random delays on streams and reused memory change no number", 80, first=True),
    Part("trainer", "mixed precision, compiled layers, random streams, checkpoints under a Trainer", 90, first=True),
    Part("nccl", "as many ranks as devices, over NCCL, equal one device", 60, first=True),
    Part("named_devices", "code between layers that names devices does what it does on one device", 60),
    Part("trainers", "Trainers over ranks with a device each equal a plain one: fit, validate, predict, resume", 300),
    Part("host_time", "time of the host per action beside that of kernels", 240),
    Part("peak_memory", "peak memory beside the plan's", 180),
    Part("largest_transformer", "GPipe's claim for one accelerator: the largest Transformer-L that trains", 600),
    Part("largest_amoebanet", "GPipe's claim for one accelerator: the largest AmoebaNet-D that trains", 600),
    Part("throughput", "one stage with m micro-batches beside the plain Trainer", 400),
)
"""By priority."""


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts of some names, or all, by priority.

    Raises:
        ValueError: there is no such part.
    """
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        raise ValueError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if part.name in names or not names]


def run_parts(parts: Sequence[Part], results: Path, conditions: Mapping[str, str], **setting: Any) -> bool:
    """Run parts and write their rows to a file after each of them. Parts of earlier runs stay in it.

    Args:
        parts: the parts.
        results: the file.
        conditions: the machine and the versions, noted with every part.
        setting: passed on to the parts: ``devices``, ``small``.

    Returns:
        Whether all of them ended by themselves and no row missed its target.
    """
    good = True
    for part in parts:
        print(f"\n{part.name}: {part.title} (at most {part.limit:g} s)", flush=True)
        start = time.monotonic()
        status, rows = run_part(part, **setting)
        found = {
            "title": part.title,
            "status": status,
            "seconds": round(time.monotonic() - start, 1),
            "conditions": dict(conditions),
            "rows": [asdict(row) for row in rows],
        }
        store(results, part.name, found)
        print(f"  {status}, {found['seconds']} s", flush=True)
        if status == INTERRUPTED:
            return False
        good = good and status == "done" and all(row.reached is not False for row in rows)
    return good


def run_part(part: Part, **setting: Any) -> tuple[str, list[Finding]]:
    """Run one part in a process of its own; returns how it ended, in words, and its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        # a blocking launch would hide what streams have to wait for
        path_of_modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "0", "PYTHONPATH": path_of_modules}
        command = [sys.executable, "-m", "tests.gpu.part", part.name, str(path), json.dumps(setting)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        try:
            code = process.wait(part.limit)
            status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"ended after {part.limit:g} s"
        except KeyboardInterrupt:  # a loan of a machine ends: what has been found is kept
            status = INTERRUPTED
        finally:
            _end(process)
        return status, list(rows_in(path))


def rows_in(path: Path) -> Iterator[Finding]:
    """The rows that a part has written; the last one may be cut short."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield Finding(**json.loads(line))


def store(results: Path, name: str, found: Mapping[str, Any]) -> None:
    """Put a part into the file, whole or not at all."""
    everything = json.loads(results.read_text()) if results.exists() else {}
    everything[name] = found
    ordered = {part.name: everything[part.name] for part in PARTS if part.name in everything}
    results.parent.mkdir(parents=True, exist_ok=True)
    temporary = results.with_suffix(".part")
    temporary.write_text(json.dumps(ordered, indent=1) + "\n")
    temporary.replace(results)


def table(results: Path) -> str:
    """All rows of a file."""
    lines = []
    for name, part in json.loads(results.read_text()).items():
        lines.append(f"{name}: {part['title']} ({part['status']}, {part['seconds']} s)")
        lines += [str(Finding(**row)) for row in part["rows"]]
    return "\n".join(lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
