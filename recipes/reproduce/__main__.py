"""The command line: ``python -m recipes.reproduce list``, a name, or ``all``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import RecipeError
from recipes.provenance import machine
from recipes.reproduce import experiments
from recipes.reproduce.report import Outcome, as_json, page, text

OUTPUT = Path("outputs/reproduce")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a mistake of the user's ends with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m recipes.reproduce", description=__doc__)
    parser.add_argument("name", help="an experiment, list, or all")
    parser.add_argument("overrides", nargs="*", help="of the experiment's file in conf/reproduce: run.depths=[4]")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the page and the JSON")
    given = parser.parse_args(arguments)
    try:
        if given.name == "list":
            print(listing())
            return
        outcomes: list[Outcome] = []
        start = time.monotonic()
        for name in experiments.names() if given.name == "all" else [given.name]:
            experiment = experiments.load(name, given.overrides)
            print(f"{name} …", file=sys.stderr, flush=True)
            outcomes.append((experiment, experiment.reproduce(stored=given.name == "all")))
    except RecipeError as error:
        sys.exit(str(error))
    print(text(outcomes))
    print(f"\n{time.monotonic() - start:.0f} s; {write(outcomes, given.output, given.name)}")


def listing() -> str:
    """All experiments with how each is reproduced."""
    loaded = [experiments.load(name) for name in experiments.names()]
    widths = [
        max(len(text) for text in column) for column in zip(*((one.name, one.place) for one in loaded), strict=True)
    ]
    return "\n".join(
        f"{one.name.ljust(widths[0])}  {one.place.ljust(widths[1])}  {one.how}"
        f"{f': {one.why}' if one.run is None else f': {one.title}'}"
        for one in loaded
    )


def write(outcomes: Sequence[Outcome], folder: Path, name: str) -> str:
    """Writes the page and the JSON, and says where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    path, about = folder / f"{name}.html", machine()
    path.with_suffix(".json").write_text(as_json(outcomes, about), encoding="utf-8")
    path.write_text(page(outcomes, f"{about}. Simulated and counted values do not depend on the machine."), "utf-8")
    return f"page {path}, data {folder / f'{name}.json'}"


if __name__ == "__main__":
    main()
