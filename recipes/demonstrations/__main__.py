"""The command line: ``python -m recipes.demonstrations``, all recipes or those that are named."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes import config
from recipes.demonstrations import runs
from recipes.demonstrations.page import cells, renewed
from recipes.errors import RecipeError
from recipes.provenance import machine

DOCS = runs.STORED.parent
OUTPUT = Path("outputs/demonstrations")


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
    try:
        check(names, known, settings, store=given.store)
        for name in names:
            print(name, flush=True)
            found = runs.demonstrate(name, given.seeds, given.output, machine(), settings)
            for row, text in cells(found).items():
                print(f"  {row:<36}{text}", flush=True)
            runs.store({name: found}, given.output / "demonstrations.json")
            if given.store:
                keep(name, found, given.output)
    except RecipeError as error:
        sys.exit(str(error))


def check(names: Sequence[str], known: Sequence[str], settings: Sequence[str], *, store: bool) -> None:
    """Refuses names that are no experiments, and to keep runs of other commands than the pages name.

    Args:
        names: of experiments.
        known: all of them.
        settings: beside the experiment.
        store: whether the runs shall be kept.
    """
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"There is no experiment {unknown[0]}.", hint=f"There are {', '.join(known)}.")
    if store and settings:
        raise RecipeError(
            f"Runs with {' '.join(settings)} are not those of the pages' first commands.", hint="Leave out --store."
        )


def keep(name: str, found: runs.Demonstration, output: Path, docs: Path = DOCS) -> None:
    """Keeps a demonstration: figures in ``demonstrations.json`` and on the page, pictures beside the page.

    Args:
        name: of the experiment.
        found: its runs.
        output: folder of the runs.
        docs: folder of the pages.
    """
    runs.store({name: found}, docs / runs.STORED.name)
    pictures = runs.pictures(name, output, found.runs[0].seed)
    for shown, path in pictures.items():
        shutil.copyfile(path, docs / "pictures" / shown)
    page = docs / f"{name}.md"
    page.write_text(renewed(page.read_text(), found, list(pictures)))


if __name__ == "__main__":
    main()
