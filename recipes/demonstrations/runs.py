"""Runs a recipe with several seeds, and keeps what the runs have measured."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import RecipeError
from recipes.samples import BETWEEN, PICTURE, TEXT

STORED = Path(__file__).resolve().parents[1] / "docs" / "demonstrations.json"
SAMPLES = 3  # texts that a page shows: the first, one in the middle, the last


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        seed: of it.
        seconds: from the start of the command to its end.
        cpu_seconds: computing time of all its processes together.
        load: of the machine before it began, over a minute: how many processes wanted to compute.
        samples_per_second: training speed; None when too short to measure.
        before: validation metrics before training.
        after: validation metrics after training, and those of a test.
    """

    seed: int
    seconds: float
    cpu_seconds: float
    load: float
    samples_per_second: float | None
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True)
class Demonstration:
    """The runs of one recipe.

    Args:
        command: that all of them were started with, but for the seed and the folder.
        machine: date, machine and versions.
        runs: one for each seed.
        samples: texts of the first run.
    """

    command: str
    machine: str
    runs: list[Run]
    samples: list[str]


def demonstrate(
    name: str, seeds: Sequence[int], folder: Path, machine: str, overrides: Sequence[str] = ()
) -> Demonstration:
    """Runs a recipe, once for each seed.

    Args:
        name: of the experiment.
        seeds: one for each run.
        folder: gets a folder for each run, and the prepared data of all.
        machine: date, machine and versions.
        overrides: further settings of all runs.
    """
    words = [f"experiment={name}", *overrides]
    runs = [run(words, seed, folder / name / f"seed{seed}", folder / "data") for seed in seeds]
    first = folder / name / f"seed{seeds[0]}" / TEXT
    texts = first.read_text().rstrip("\n").split(BETWEEN) if first.exists() else []
    shown = [texts[place * (len(texts) - 1) // (SAMPLES - 1)] for place in range(SAMPLES)] if texts else []
    return Demonstration(f"python -m recipes.train {shlex.join(words)}", machine, runs, shown)


def run(words: Sequence[str], seed: int, folder: Path, data: Path) -> Run:
    """Trains in processes of its own with one thread each, on what this machine has: no hub is asked.

    Args:
        words: of the command line.
        seed: of the run.
        folder: of the run; emptied.
        data: folder for prepared data.

    Raises:
        RecipeError: the run has failed; its output is in a file.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places = [f"seed={seed}", f"hydra.run.dir={folder.resolve()}", f"paths.data={data.resolve()}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    load, computing, start = os.getloadavg()[0], _computing(), time.monotonic()
    output = folder / "output.txt"
    with output.open("w") as file:
        command = [sys.executable, "-m", "recipes.train", *words, *places]
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        raise RecipeError(f"python -m recipes.train {shlex.join(words)} has failed.", hint=f"Read {output}.")
    told = json.loads((folder / "summary.json").read_text())
    return Run(
        seed=seed,
        seconds=round(seconds, 1),
        cpu_seconds=round(_computing() - computing, 1),
        load=round(load, 2),
        **{name: told[name] for name in ("samples_per_second", "before", "after")},
    )


def _computing() -> float:
    """Seconds that child processes which have ended, and theirs, have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pictures(name: str, folder: Path, seed: int) -> dict[str, Path]:
    """The pictures that a run has left, by the names that they have beside the page.

    Args:
        name: of the experiment.
        folder: of `demonstrate`.
        seed: of the run.
    """
    left = {f"{name}.png": "curve.png", f"{name}_samples.png": PICTURE}
    paths = {shown: folder / name / f"seed{seed}" / file for shown, file in left.items()}
    return {shown: path for shown, path in paths.items() if path.exists()}


def store(found: dict[str, Demonstration], path: Path = STORED) -> None:
    """Keeps demonstrations in the place of earlier ones of the same recipes.

    Args:
        found: by recipe.
        path: of the file.
    """
    every = stored(path) | found
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {name: asdict(every[name]) for name in sorted(every)}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def stored(path: Path = STORED) -> dict[str, Demonstration]:
    """The demonstrations that are kept, by recipe.

    Args:
        path: of the file.
    """
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Demonstration(**one | {"runs": [Run(**each) for each in one["runs"]]}) for name, one in content.items()
    }
