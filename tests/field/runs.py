"""Runs a published module on one device, by the word, and with the remedies that errors and warnings name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.field import verdicts
from tests.field.modules import FOLDER, MODULES, Published

ROOT = FOLDER.parents[1]
KEPT = ROOT / "outputs" / "field"
SECONDS = 180
MOST_REMEDIES = 4


@dataclass
class Finding:
    """What came out for a module.

    Args:
        name: of the module.
        verdict: one of `verdicts.VERDICTS`.
        word: the verdict on the word alone; that of a run with its remedies is ``verdict``.
        remedy: the options that messages have named.
        one_optimizer: whether the module trains with one, stepped by the Trainer.
        distances: the largest differences of losses and weights from one device, in the run that was judged last.
        message: the first error or warning.
        runs: for each run its options, distance, error and warnings.
    """

    name: str
    verdict: str = verdicts.UNTRAINABLE
    word: str = verdicts.UNTRAINABLE
    remedy: dict[str, Any] = field(default_factory=dict)
    one_optimizer: bool = True
    distances: tuple[float, float] | None = None
    message: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)


def train(name: str, **asked: Any) -> tuple[dict[str, Any], str]:
    """Train in processes of their own; the outcome, and all that was printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.field.train", name, folder, json.dumps(asked)]
        hidden = {"OMP_NUM_THREADS": "1", "LIGHTNING_PIPE_CACHE": folder, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
        with (Path(folder) / "log").open("w+") as log:
            running = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | hidden, stdout=log, stderr=log, start_new_session=True
            )
            late = False
            try:
                running.wait(SECONDS)
            except subprocess.TimeoutExpired:
                late = True
            finally:  # those that the run has started, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
            log.seek(0)
            printed = log.read()
        outcomes = [torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("*.pt"))]
    return _joined(outcomes, running.returncode, late, printed), printed


def _joined(outcomes: list[dict[str, Any]], code: int, late: bool, printed: str) -> dict[str, Any]:
    """What the processes of a run have left: the error of the rank that failed, or what rank 0 has trained."""
    warned = dict.fromkeys(warning for outcome in outcomes for warning in outcome["warnings"])
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    errors.sort(key=lambda error: error["type"] in ("CommunicationError", "SystemExit", "KeyboardInterrupt"))
    if late or (not errors and (code or not outcomes)):
        message = f"did not end within {SECONDS} s" if late else f"ended with {code}: {printed[-2000:]}"
        errors = [{"type": "", "ours": False, "message": message, "hint": "", "by_us": True, "traceback": ""}]
    return ({"error": errors[0]} if errors else outcomes[0]) | {"warnings": verdicts.on_numbers(list(warned))}


def judged(published: Published) -> Finding:
    """Run a module in every way that its verdict needs."""
    finding = Finding(published.name)
    one, _ = train(published.name)
    if "error" in one:
        finding.message = f"{one['error']['type']}: {one['error']['message']}"
        finding.runs.append({"error": one["error"]})
        return finding
    finding.one_optimizer = one["optimizers"] == 1
    named: list[tuple[str, Any]] = []
    tried: list[tuple[str, Any]] = []
    sure: dict[str, Any] = {}
    while True:
        found, log = train(published.name, strategy="pipe", options=finding.remedy)
        finding.verdict, finding.distances = _verdict(published.name, one, found, log, bool(finding.remedy))
        error, warnings = found.get("error"), found["warnings"]
        finding.runs.append({"options": dict(finding.remedy), "verdict": finding.verdict, "error": error})
        finding.runs[-1] |= {"distances": finding.distances, "warnings": warnings}
        if len(finding.runs) == 1:
            finding.word = finding.verdict
            finding.message = f"{error['type']}: {error['message']}" if error else " ".join(warnings)
        if finding.verdict in (verdicts.EQUAL, verdicts.SLICED):
            finding.verdict = verdicts.REMEDIED if finding.remedy else finding.verdict
            return finding
        beyond = finding.verdict in (verdicts.SILENT, verdicts.RANDOM) or (error and not error["ours"])
        if beyond or len(finding.runs) > MOST_REMEDIES:
            return finding
        text = error["hint"] if error else " ".join(warnings)
        named = [option for option in verdicts.options(text) if option not in tried] + named
        untried = [option for option in named if option not in tried]
        if not untried:
            return finding
        tried.append(untried[0])
        finding.remedy = sure | dict(tried[-1:])
        if error:  # what a warning has named stays only if it is all that was missing
            sure = finding.remedy


def _verdict(
    name: str, one: dict[str, Any], found: dict[str, Any], log: str, tried: bool
) -> tuple[str, tuple[float, float] | None]:
    if "error" in found:
        return verdicts.failure(found["error"], tried), None
    tolerance = verdicts.TOLERANCES[one["double"]]
    apart = verdicts.distances(found, one)
    if max(apart) <= tolerance:
        return verdicts.EQUAL, apart
    slices = verdicts.cut_into(log)
    if one["norms"] and slices > 1 and verdicts.says_so(log):
        accumulated, _ = train(name, slices=slices)
        if "error" not in accumulated:
            sliced = verdicts.distances(found, accumulated, "parameters")
            if max(sliced) <= tolerance:
                return verdicts.SLICED, sliced
    other, _ = train(name, seed=9)
    if max(verdicts.distances(other, one)) > tolerance:
        return verdicts.RANDOM, apart
    return (verdicts.WARNED if found["warnings"] else verdicts.SILENT), apart


def code() -> str:
    """A name for the sources of the package and of these tests: what was found with others is found again."""
    digest = hashlib.sha256()
    own = [FOLDER / f"{name}.py" for name in ("wrapping", "train", "runs", "verdicts")]
    for path in sorted([*(ROOT / "lightning_pipe").rglob("*.py"), *own]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def finding(name: str, again: bool) -> Finding:
    """What is known of a module on these sources, or comes out now."""
    published = MODULES[name]
    case = hashlib.sha256((FOLDER / "cases" / f"{published.file}.py").read_bytes()).hexdigest()[:6]
    kept = KEPT / f"{name}-{code()}-{case}.json"
    if kept.exists() and not again:
        return Finding(**json.loads(kept.read_text()))
    made = judged(published)
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(made), indent=1, default=str))
    return made
