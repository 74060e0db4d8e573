"""Every fault of the campaign, with what is required of a run in which it happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

REASON = "ValueError: an injected fault"
PHASES = (
    "configure_callbacks",
    "connecting",
    "setup",
    "sanity",
    "first",
    "middle",
    "validation",
    "saving",
    "writing",
    "train_end",
    "fit_end",
    "teardown",
)
_DEAD = r"(?i)killed|has gone|have left|has left|signal|left without|has ended|exit code|ended with code"
_PLACE = r"has not come on since \d\d:\d\d:\d\d, \d+ s ago: .*(waits to|computes in) "
_CONNECTING = ("configure_callbacks", "connecting")


@dataclass(frozen=True)
class Fault:
    """One fault, at one place of one process.

    Args:
        kind: what happens; a method of `tests.faults.injection.Injection`.
        phase: where in the run; ``""`` for kinds with a place of their own.
        process: the process to which it happens; ``None``: all.
        processes: of the run; four are two pipelines.
        told: what the output of all processes must contain.
        each: whether the output of each process must.
        untold: what the output of no process may contain.
        codes: exit codes that process 0 may have; ``None``: any but 0.
        within: seconds from the fault to the end of the last process.
        timeout: the strategy's, in seconds.
        options: for the script.
    """

    kind: str
    phase: str
    process: int | None
    processes: int = 2
    told: str = REASON
    each: bool = False
    untold: str = ""
    codes: tuple[int, ...] | None = None
    within: float = 10.0
    timeout: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How the command line calls it."""
        where = "all" if self.process is None else self.process
        number = f"of{self.processes}" if self.processes != 2 else ""
        return f"{self.kind}@{self.phase or 'run'}:{where}{number}" + "-sharded" * bool(self.options.get("sharded"))

    @property
    def success(self) -> bool:
        """Whether the run must succeed."""
        return self.codes == (0,)


def catalogue() -> dict[str, Fault]:
    """All faults by name."""
    faults: dict[str, Fault] = {}
    for fault in (*_everywhere(), *_replicated(), *_sharded(), *_alone(), *_second(), *_files(), *_data()):
        assert fault.name not in faults, fault.name
        faults[fault.name] = fault
    return faults


def _fault(kind: str, phase: str, process: int, processes: int = 2) -> Fault:
    """One of the kinds that can happen everywhere."""
    own = process == 0
    # rank 0's file, or the folder that all write
    options = {"folder": True} if phase in ("writing", "rewriting") else {}
    if kind == "raise":
        return Fault(kind, phase, process, processes, codes=(1,) if own else None, options=options)
    if kind == "sys_exit":
        # Python prints nothing about it: before the processes are connected, only the exit code tells. While a
        # checkpoint is written, the checkpoint's error names the file beside the reason.
        told, codes = ("", (3,)) if own else ("SystemExit: 3|has ended with code 3", None)
        if own and phase == "writing":
            told, codes = "SystemExit: 3", (1,)
        return Fault(kind, phase, process, processes, told=told, codes=codes, options=options)
    # the first process takes the others with it
    if kind == "kill":
        return Fault(kind, phase, process, processes, told="" if own else _DEAD, codes=(-9,) if own else None,
                     options=options)  # fmt: skip
    if kind == "os_exit":
        return Fault(kind, phase, process, processes, told="" if own else _DEAD, codes=(7,) if own else None,
                     options=options)  # fmt: skip
    if kind == "term":
        return Fault(kind, phase, process, processes, told="SIGTERM", codes=(143,) if own else None,
                     options=options)  # fmt: skip
    if kind in ("hang", "lock"):
        # a process whose interpreter's lock is held says nothing in words
        connected = phase not in _CONNECTING
        told = _PLACE if connected else r"has waited \d+ s|could not reach process 0 at .* within"
        if phase == "writing":  # torch's own collectives do not say what they wait for: the error does
            told += "|could not wait until the checkpoint .* was written by all within"
        return Fault(kind, phase, process, processes, told=told,
                     each=kind == "hang" and connected, within=20.0, timeout=10.0, options=options)  # fmt: skip
    raise ValueError(kind)


def _everywhere() -> Iterator[Fault]:
    for kind in ("raise", "sys_exit", "kill", "os_exit", "hang"):
        for phase in PHASES:
            for process in (0, 1):
                yield _fault(kind, phase, process)
    for phase in ("first", "middle", "validation", "saving"):
        for process in (0, 1):
            yield _fault("term", phase, process)
    for process in (0, 1):
        yield _fault("lock", "middle", process)
        for phase in ("middle", "validation"):
            yield Fault("interrupt", phase, process, told="Detected KeyboardInterrupt",
                        untold="CommunicationError|Traceback", codes=(1,))  # fmt: skip
    yield Fault("raise", "after", 1, codes=(1,))


def _replicated() -> Iterator[Fault]:
    """Two pipelines of two ranks."""
    for process in (0, 1, 2, 3):
        for phase in ("configure_callbacks", "middle", "writing", "fit_end"):
            yield _fault("raise", phase, process, 4)
        yield _fault("kill", "middle", process, 4)
    yield _fault("hang", "middle", 3, 4)
    yield Fault("uneven", "", None, 4, told=r"(?i)fewer batches|more batches|differ")


def _sharded() -> Iterator[Fault]:
    """Two pipelines of two ranks, which divide all parameters."""
    for process in (0, 3):
        for kind in ("raise", "kill", "hang"):
            fault = _fault(kind, "middle", process, 4)
            yield replace(fault, options={**fault.options, "sharded": True})


def _alone() -> Iterator[Fault]:
    """What all processes must do, done by one of them."""
    for phase in ("middle", "batch_start", "batch_end", "validation_end", "epoch_start"):
        for process in (0, 1):
            # process 0 tells the others with its report about the batch, if it asks before that
            if process == 0 and phase in ("middle", "batch_start"):
                yield Fault("should_stop", phase, process, codes=(0,), told="")
            else:
                yield Fault("should_stop", phase, process, told="is called on rank")
    for kind in ("save", "barrier"):
        told = rf"injection\.py.*in {kind}"
        for phase in ("batch_start", "batch_end", "validation_end", "fit_end"):
            for process in (0, 1):
                yield Fault(kind, phase, process, told=told)
        if kind == "save":
            yield Fault(kind, "middle", 0, told=r"called within a step")
        for process in (0, 3):
            yield Fault(kind, "batch_end", process, 4, told=told)


def _second(kinds: tuple[str, ...] = ("slow", "hang", "raise", "kill")) -> Iterator[Fault]:
    """One process raises, and something happens to another one while it hears of it."""
    for first in (0, 1):
        for kind in kinds:
            yield Fault(kind, "exception", 1 - first, options={"first": first}, within=35.0, timeout=20.0)
    # one process is busy, so that it hears late of the error of the other
    for where in ("busy_step", "busy_hook", "busy_worker", "busy_folder"):
        phase = "batch_start" if where == "busy_hook" else "middle"
        yield Fault(where, phase, 0, options={"first": 1, "folder": where == "busy_folder"}, within=35.0)
    yield Fault("raise", "middle", None)
    yield Fault("on_exception_checkpoint", "middle", 0, told=r"(?i)on_exception\.ckpt was not written", codes=(1,))
    yield Fault("on_exception_checkpoint", "middle", 1, told=r"(?i)on_exception\.ckpt was not written")


def _files() -> Iterator[Fault]:
    """Checkpoints that cannot be written or read."""
    for folder in (False, True):
        for process in (0, 1) if folder else (0,):
            kind = "full_folder" if folder else "full_file"
            yield Fault(kind, "saving", process, told=r"\.ckpt", options={"folder": folder})
    for kind in ("kill", "raise"):
        for process in (0, 1):
            yield _fault(kind, "rewriting", process)
        yield _fault(kind, "writing_file", 0)
        yield _fault(kind, "rewriting_file", 0)
    for what in ("missing", "truncated", "empty", "foreign", "folder", "half_folder", "truncated_folder"):
        options = {"resume": what}
        yield Fault(f"{what}_checkpoint", "resuming", None, told=r"resume_from\.ckpt", options=options)
    for process in (0, 1):
        yield Fault("descriptors", "middle", process, told=r"(?i)too many open files|file descriptors")


def _data() -> Iterator[Fault]:
    """Worker processes of the loader."""
    yield Fault("worker_raises", "", 0, codes=(1,))
    yield Fault("worker_is_killed", "", 0, told=r"(?i)worker.*(killed|exited)", codes=(1,))
    yield Fault("worker_hangs", "", 0, told=_PLACE, each=True, within=20.0, timeout=10.0)
    yield Fault("loader_raises", "", 0, codes=(1,))
