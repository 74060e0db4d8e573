"""``python -m tests.gpu [PARTS…]``: runs what needs CUDA devices, and writes ``results/gpu.json`` and a table.

Parts run by priority, each with a time limit; the first six are done within nine minutes. Nothing is installed: it runs
on the torch that is there. Without a CUDA device it prints NOT RUN and writes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import sys

from tests.gpu.runner import PARTS, ROOT, chosen, run_parts, table

NEEDED = ("torch", "lightning")


def obstacle() -> str | None:
    """Why nothing can run here; ``None`` if it can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)}"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def conditions() -> dict[str, str]:
    """What the figures depend on."""
    import lightning
    import torch

    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return {
        "devices": f"{torch.cuda.device_count()} x {', '.join(sorted(names))}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the named parts, or all; 0 if all of them ran and reached their targets."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    listed = "; ".join(f"{part.name}: {part.title}" for part in PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run, or 'first'; all by default. {listed}")
    names = parser.parse_args(arguments).parts
    if names == ["first"]:
        names = [part.name for part in PARTS if part.first]
    try:
        parts = chosen(names)
    except ValueError as error:
        parser.error(str(error))
    reason = obstacle()
    if reason is not None:
        print(f"NOT RUN: {reason}")
        return 1
    import torch

    results = ROOT / "results" / "gpu.json"
    good = run_parts(parts, results, conditions(), devices=torch.cuda.device_count())
    print(f"\n{table(results)}\n\n{results}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
