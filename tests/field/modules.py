"""The list of published modules, as tests/field/modules.toml has it."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.field.wrapping import Case

FOLDER = Path(__file__).resolve().parent
_LIST = tomllib.loads((FOLDER / "modules.toml").read_text())
PACKAGES: dict[str, str] = _LIST["packages"]

# The file of tests/field/cases that makes the modules of a kind.
_FILES = {
    "time series with RNNs": "series",
    "time series by attention": "series",
    "time series, other networks": "series",
    "segmentation": "images",
    "classification with batch norm": "images",
    "vision transformer": "images",
    "text encoder": "text",
    "causal language model": "text",
    "encoder-decoder": "text",
    "two towers": "pairs",
    "self-supervised with two passes": "pairs",
    "molecules and single cells": "molecules",
}


@dataclass(frozen=True)
class Published:
    """A module of the list.

    Args:
        name: that of the function which makes it.
        kind: of network.
        package: that it comes from.
        path: the class.
        form: "own" if the package has the LightningModule, "wrapped" if its users write it.
    """

    name: str
    kind: str
    package: str
    path: str
    form: str

    @property
    def file(self) -> str:
        """The module with the function that makes it."""
        return _FILES.get(self.kind, self.kind)

    def make(self) -> Callable[[], Case]:
        """The function that makes the LightningModule and its batches; imports the package."""
        made: Callable[[], Case] = getattr(importlib.import_module(f"tests.field.cases.{self.file}"), self.name)
        return made


MODULES = {
    name: Published(name, kind, entry["package"], entry["class"], entry["form"])
    for kind, entries in _LIST["modules"].items()
    for name, entry in entries.items()
}

if __name__ == "__main__":  # what `make` installs
    print(*(f"{package}=={version}" for package, version in PACKAGES.items()))
