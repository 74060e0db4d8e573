"""The first command of each recipe's page, run with several seeds: figures, pictures and samples for that page.

``python -m recipes.demonstrations`` runs all recipes, or those that are named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import config
from recipes.errors import RecipeError
from recipes.provenance import machine
from recipes.samples import BETWEEN, PICTURE, TEXT

DOCS = Path(__file__).with_name("docs")
OUTPUT = Path("outputs/demonstrations")
FILE = "demonstrations.json"
SAMPLES = 3  # texts that a page shows: the first, one in the middle, the last
ROW = re.compile(r"^(\| ?([^|]*?) \| )(.*?)(?= \|)", re.MULTILINE)
END = "**Not reproduced here:**"
BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
Runs = dict[str, Any]
"""The runs of one recipe as `FILE` has them: the ``command`` and ``machine`` of all, one of ``runs`` for each seed, and
the ``samples`` of the first."""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


METRICS: dict[str, tuple[str, Callable[[float], str]]] = {
    "val_loss": ("validation loss", "{:.3f}".format),
    "val_perplexity": ("validation perplexity", "{:,.0f}".format),
    "val_top1": ("top-1 accuracy", _percent),
    "val_top5": ("top-5 accuracy", _percent),
    "val_psnr": ("signal to noise (PSNR)", "{:.1f} dB".format),
    "val_masked_accuracy": ("accuracy of masked tokens", _percent),
    "val_next_accuracy": ("accuracy of the next sentence", _percent),
    "val_token_accuracy": ("accuracy of the next token", _percent),
    "test_bleu": ("BLEU", lambda value: f"{100 * value:.1f}"),
}
"""For each metric the first cell of its row, and what writes a value in words."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a run that fails ends it with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demonstrations", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="NAME", help="experiments, and settings such as trainer.devices=4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one for each run")
    parser.add_argument("--store", action="store_true", help="keep figures, pictures and samples in recipes/docs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the runs")
    given = parser.parse_intermixed_args(arguments)
    known = sorted(path.stem for path in (config.CONF / "experiment").glob("*.yaml"))
    settings = [word for word in given.words if "=" in word]
    names = [word for word in given.words if "=" not in word] or known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"There is no experiment {unknown[0]}.\nHint: There are {', '.join(known)}.")
    if given.store and settings:
        told = f"Runs with {' '.join(settings)} are not those of the pages' first commands."
        sys.exit(f"{told}\nHint: Leave out --store.")
    for name in names:
        print(name, flush=True)
        try:
            found = demonstrate(name, given.seeds, given.output, settings)
        except RecipeError as error:
            sys.exit(str(error))
        for row, text in cells(found).items():
            print(f"  {row:<36}{text}", flush=True)
        store(name, found, given.output)
        if given.store:
            keep(name, found, given.output)


def demonstrate(name: str, seeds: Sequence[int], folder: Path, overrides: Sequence[str] = ()) -> Runs:
    """Runs a recipe, once for each seed.

    Args:
        name: of the experiment.
        seeds: one for each run.
        folder: gets a folder for each run, and the prepared data of all.
        overrides: further settings of all runs.
    """
    words = [f"experiment={name}", *overrides]
    runs = [run(words, seed, folder / name / f"seed{seed}", folder / "data") for seed in seeds]
    first = folder / name / f"seed{seeds[0]}" / TEXT
    texts = first.read_text().rstrip("\n").split(BETWEEN) if first.exists() else []
    shown = [texts[place * (len(texts) - 1) // (SAMPLES - 1)] for place in range(SAMPLES)] if texts else []
    command = f"python -m recipes.train {shlex.join(words)}"
    return {"command": command, "machine": machine(), "runs": runs, "samples": shown}


def run(words: Sequence[str], seed: int, folder: Path, data: Path) -> dict[str, Any]:
    """Trains in processes of its own with one thread each, on what this machine has: no hub is asked.

    Args:
        words: of the command line.
        seed: of the run.
        folder: of the run; emptied.
        data: folder for prepared data.

    Returns:
        what the run has left in ``summary.json``, with the seconds that it took, those that all its processes together
        have computed, and how many processes wanted to compute in the minute before it began.

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
    measured = {"seconds": round(seconds, 1), "cpu_seconds": round(_computing() - computing, 1), "load": round(load, 2)}
    return {"seed": seed, **measured, **{name: told[name] for name in ("samples_per_second", "before", "after")}}


def _computing() -> float:
    """Seconds that child processes which have ended, and theirs, have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stored(folder: Path = DOCS) -> dict[str, Runs]:
    """The demonstrations that a folder has, by recipe."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(name: str, found: Runs, folder: Path) -> None:
    """Keeps a demonstration in a folder, in the place of an earlier one of the same recipe."""
    every = stored(folder) | {name: found}
    content = json.dumps({name: every[name] for name in sorted(every)}, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(content + "\n", encoding="utf-8")


def keep(name: str, found: Runs, output: Path, docs: Path = DOCS) -> None:
    """Keeps a demonstration for its page: figures in `FILE` and on the page, pictures beside the page.

    Args:
        name: of the experiment.
        found: its runs.
        output: folder of the runs.
        docs: folder of the pages.
    """
    store(name, found, docs)
    left = output / name / f"seed{found['runs'][0]['seed']}"
    pictures = {f"{name}.png": left / "curve.png", f"{name}_samples.png": left / PICTURE}
    shown = [picture for picture, path in pictures.items() if path.exists()]
    for picture in shown:
        shutil.copyfile(pictures[picture], docs / "pictures" / picture)
    page = docs / f"{name}.md"
    page.write_text(renewed(page.read_text(), found, shown))


def renewed(page: str, found: Runs, pictures: Sequence[str] = ()) -> str:
    """A page with the figures and the samples of a demonstration in the place of those that it has.

    In each row of the table that the runs tell something about, the second cell is written anew. So is the block of
    code with the language "text". That block and pictures which the page does not show yet are put near its end.

    Args:
        page: Markdown.
        found: what its first command came to.
        pictures: names of those in the folder ``pictures`` that belong to the page.
    """
    told, seed = cells(found), found["runs"][0]["seed"]
    page = ROW.sub(lambda row: row[1] + told.get(row[2], row[3]), page)
    for name in pictures:
        if f"](pictures/{name})" not in page:
            what = "What the model makes of a few samples" if "samples" in name else "Losses and metrics by step"
            page = _before_the_end(page, f"![{what}, with seed {seed}](pictures/{name})")
    if not found["samples"]:
        return page
    if not BLOCK.search(page):
        start = f"The first, the middle and the last sample of the run with seed {seed}, as `samples.txt` has them:"
        page = _before_the_end(page, f"{start}\n\n```text\n```")
    samples = "\n\n".join(found["samples"]).replace("```", "'''") + "\n"
    return BLOCK.sub(lambda _: samples, page)


def _before_the_end(page: str, text: str) -> str:
    """The page with a paragraph before what it says about what is not reproduced."""
    return page.replace(END, f"{text}\n\n{END}", 1) if END in page else f"{page}\n{text}\n"


def cells(found: Runs) -> dict[str, str]:
    """The cells of a demonstration by the first cell of their row."""
    runs: list[Mapping[str, Any]] = found["runs"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    told = f"mean of seeds {seeds} (lowest to highest)" if len(runs) > 1 else f"seed {seeds}"
    rows = {
        "": f"here, `size=tiny` (first command): {told}",
        "hardware": f"{found['machine']}; load {runs[0]['load']:.1f} before; two stages, 1F1B, one thread each",
        "time": _spread([run["seconds"] for run in runs], _minutes),
        "computing time of both processes": _spread([run["cpu_seconds"] for run in runs], _minutes),
    }
    if speeds := [run["samples_per_second"] for run in runs if run["samples_per_second"] is not None]:
        rows["training speed"] = _spread(speeds, "{:.0f} samples/s".format)
    for name, (row, text) in METRICS.items():
        if name in runs[0]["after"]:
            after = _spread([run["after"][name] for run in runs], text)
            before = [run["before"][name] for run in runs if name in run["before"]]
            start = f"{text(statistics.mean(before))} before training, " if before else ""
            rows[row] = f"{start}{after}{' after' if before else ''}"
    return rows


def _spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The mean, and the lowest and highest value where there are several."""
    if len(values) == 1:
        return text(values[0])
    return f"{text(statistics.mean(values))} ({text(min(values))} to {text(max(values))})"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


if __name__ == "__main__":
    main()
