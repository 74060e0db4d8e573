"""Runs the benchmarks one after the other and prints what they found."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

BENCHMARKS = {
    "engine_cost": "cost of the engine per action, and of interception",
    "overlap": "sums over replicas beside the cool-down, with layers that sleep",
    "families": "bubble of every synchronous schedule, with layers that sleep, and the gain of Chimera",
    "chimera": "Chimera over 1F1B with matrix products of four sizes",
    "evaluation": "time of validate, test and predict, with layers that sleep",
    "trainer_cost": "time of a small batch under the Trainer, beside DDP and the bare engine",
    "generation": "tokens per second of generate() in an evaluation step, beside one device's",
    "asynchronous": "bubble of the schedules without a flush under a Trainer, with layers that sleep",
    "prediction": "predicted step times of twelve configurations against measured ones, and the choice among them",
    "gpipe": "recomputation, its early start, and a balance by measured time",
    "against_torch": "samples per second over torch.distributed.pipelining's",
    "construction": "peak host memory of processes that build and divide a large GPT-2",
    "meta": "peak host memory of processes that divide a module built on the meta device",
    "memory": "peak host memory of processes that train, save, export and resume a large GPT-2",
    "sharding": "gradients and optimizer state of processes that divide them",
    "accumulation": "one stage with m micro-batches over the plain Trainer with accumulate_grad_batches=m",
}


def main() -> int:
    """Run the named benchmarks, or all; the exit code says whether every target was reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="benchmarks to run; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, wider intervals")
    arguments = parser.parse_args()
    import torch

    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()}"
    )
    missed = 0
    for name in arguments.names or BENCHMARKS:
        start = time.perf_counter()
        print(f"\n{name}: {BENCHMARKS[name]}", flush=True)
        for finding in importlib.import_module(f"tests.benchmarks.{name}").run(arguments.quick):
            print(finding, flush=True)
            missed += finding.reached is False
        print(f"  ({time.perf_counter() - start:.0f} s)")
    print(f"\n{missed} targets missed" if missed else "\nall targets reached")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
