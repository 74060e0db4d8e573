"""The recipes' pages name every experiment, and the commands in them compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.recipes.conftest import CONF, ROOT
from tests.support.pairs import slow_but

DOCS = ROOT / "recipes" / "docs"
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted(DOCS.glob("*.md"))]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def commands(page: Path) -> Iterator[list[str]]:
    """The overrides of all commands that train or plan, one for each job of a sweep's first values."""
    for line in re.findall(r"^python -m recipes\.(?:train|plan) (.*)$", page.read_text(), re.MULTILINE):
        words = shlex.split(re.split(r"\s{2,}", line)[0], comments=True)
        given = [word for word in words if "=" in word]
        yield [word if "[" in word else word.split(",")[0] for word in given]


def test_every_experiment_has_a_page_that_the_index_links() -> None:
    assert sorted(path.stem for path in DOCS.glob("*.md")) == EXPERIMENTS
    index = (ROOT / "recipes" / "README.md").read_text()
    for experiment in EXPERIMENTS:
        assert f"[`{experiment}`](docs/{experiment}.md)" in index
        page = (DOCS / f"{experiment}.md").read_text()
        for part in ("**The paper.**", "**The recipe.**", "**Not reproduced here:**", "| hardware |", "| time |"):
            assert part in page, (experiment, part)
        assert f"python -m recipes.train experiment={experiment} " in page
    assert "(recipes/README.md)" in (ROOT / "README.md").read_text()


# Other tests compose every experiment with every value of these.
COMPOSED = {"experiment", "size", "pipe", "trainer", "debug", "trainer.devices"}
# What is installed with the extras.
PLUGINS = {
    "hparams_search": "hydra_plugins.hydra_optuna_sweeper",
    "hydra/launcher": "hydra_plugins.hydra_submitit_launcher",
}


def installed(plugin: str) -> bool:
    try:
        return find_spec(plugin) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


@pytest.mark.parametrize("page", slow_but(PAGES, PAGES[0]), ids=lambda page: page.stem)
def test_the_commands_compose(page: Path, composed: Callable[..., DictConfig]) -> None:
    found = {tuple(overrides) for overrides in commands(page)}
    assert found
    for overrides in found:
        settings = dict(word.split("=", 1) for word in overrides)
        assert settings["experiment"] in EXPERIMENTS
        missing = [key for key in settings.keys() & PLUGINS.keys() if not installed(PLUGINS[key])]
        if not missing and not settings.keys() <= COMPOSED:
            composed(*overrides)
