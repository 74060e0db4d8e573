"""The registry: an experiment for each file of conf/reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.config import CONF, composed
from recipes.errors import RecipeError
from recipes.reproduce.published import paper
from recipes.reproduce.results import Result

FOLDER = CONF / "reproduce"
STORED = Path(__file__).with_name("stored")
HOW = ("counted", "simulated", "ran here", "not possible here")


@dataclass
class Source:
    """Where the published values are."""

    paper: str = MISSING  # chimera, gpipe or torchgpipe
    place: str = MISSING  # table or figure


@dataclass
class Experiment:
    """One table or figure of a paper, as its file in conf/reproduce says it."""

    title: str = MISSING
    source: Source = field(default_factory=Source)
    how: str = MISSING  # one of HOW
    set_up: str = MISSING  # in a sentence
    why: str = ""  # of what is not possible here, or is left out
    long: bool = False  # `all` shows what an earlier run by name has left in recipes/reproduce/stored
    run: Any = None  # the function that makes the rows, with its arguments and tolerances
    name: str = MISSING

    @property
    def place(self) -> str:
        """Paper and table or figure."""
        return f"{self.source.paper}, {self.source.place}"

    def reproduce(self, *, stored: bool = False) -> Result:
        """The rows and pictures; nothing for what is not possible here.

        Args:
            stored: of what takes long, the rows of an earlier run.
        """
        if self.run is None:
            return Result.of([])
        if self.long and stored:
            return Result.stored(STORED / f"{self.name}.json")
        result: Result = instantiate(self.run, _convert_="all")
        return result

    def citation(self) -> str:
        """The source in full."""
        about = paper(self.source.paper)["_source"]
        return f"{about['authors']}, {about['title']}" + (f", {about['venue']}" if about["venue"] else "")


def names() -> list[str]:
    """All experiments, those of a paper together."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """An experiment by its name.

    Args:
        name: as its file.
        overrides: in Hydra's form, as ``run.depths=[4]``.

    Raises:
        RecipeError: there is no such experiment or key.
    """
    if name not in names():
        raise RecipeError(
            f"There is no experiment {name!r}.", hint="python -m recipes.reproduce list shows those there are."
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Experiment(name=name)), composed(overrides, name, FOLDER))
        experiment = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException) as error:
        raise RecipeError(f"{name}: {error}") from error
    assert isinstance(experiment, Experiment)
    if experiment.how not in HOW:
        raise RecipeError(f"{name}: how is one of {', '.join(HOW)}, not {experiment.how!r}.")
    return experiment
