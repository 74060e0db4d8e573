"""``python -m tests.faults``: every fault, or those whose names are given, and one table.

python -m tests.faults list                      the names
python -m tests.faults raise@middle:1            one fault, with the output of its processes
python -m tests.faults raise@ :1                 those whose names contain all these words
python -m tests.faults --jobs 2                  all, two at a time
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.faults.catalogue import Fault, catalogue
from tests.faults.running import Ended, run

_HEAD = ("fault", "phase", "process", "ended in", "exit codes", "told by", "verdict")
_LINE = "{:<24} {:<20} {:<8} {:>8}  {:<22} {:<14} {}"


def main() -> int:
    """Run faults and print the table; 0 if all have ended as required."""
    parser = argparse.ArgumentParser("python -m tests.faults", description="Injects faults into small runs.")
    parser.add_argument("words", nargs="*", help="a name, 'list', or words that the names contain")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--verbose", action="store_true", help="print what the processes of failing runs printed")
    arguments = parser.parse_args()
    faults = catalogue()
    if arguments.words == ["list"]:
        print("\n".join(faults))
        return 0
    words = arguments.words
    chosen = [faults[word] for word in words if word in faults]
    chosen = chosen or [fault for name, fault in faults.items() if all(word in name for word in words)]
    print(_LINE.format(*_HEAD), flush=True)
    bad = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for ended in pool.map(run, chosen):
            bad += bool(ended.problems())
            print(line(ended), flush=True)
            if len(chosen) == 1 or (arguments.verbose and ended.problems()):
                print(printed(ended), flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} as required")
    return int(bad > 0)


def line(ended: Ended) -> str:
    """The table's line for a run."""
    fault: Fault = ended.fault
    codes = " ".join("-" if code is None else str(code) for _, code in sorted(ended.codes.items()))
    told = " ".join(f"{number}" + (f" x{count}" if count > 1 else "") for number, count in ended.tellers.items())
    where = "all" if fault.process is None else f"{fault.process} of {fault.processes}"
    seconds = "-" if ended.seconds is None else f"{ended.seconds:.1f} s"
    verdict = "; ".join(ended.problems()) or "ok"
    return _LINE.format(fault.kind, fault.phase or "-", where, seconds, codes, told or "-", verdict)


def printed(ended: Ended) -> str:
    """What the processes have printed."""
    return "\n".join(f"--- process {number} ---\n{text}" for number, text in sorted(ended.outputs.items()))


if __name__ == "__main__":
    sys.exit(main())
