"""Data that one process on every machine prepares, in a cache on disk, and all processes then open."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from pathlib import Path

from typing_extensions import override

from recipes.data.loading import ResumableData
from recipes.errors import RecipeError


class Prepared(ResumableData):
    """A data module whose data is a folder in a cache.

    Subclasses call ``save_hyperparameters`` and tell the cache.
    """

    cache: Path

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._is_prepared = False

    @abstractmethod
    def prepare(self) -> Path:
        """Returns the folder with the data, which is complete."""

    def check(self) -> None:
        """Called when the folder is there: refuses data that does not fit the model."""

    @property
    def folder(self) -> Path:
        """The folder with the data."""
        if self._folder is None:
            raise RecipeError("The data module is not set up.", hint="Call prepare_data() and setup() first.")
        return self._folder

    @override
    def prepare_data(self) -> None:
        """Runs in one process on every machine, and notes for the others where the data is."""
        if not self._is_prepared:  # the Trainer asks before each of validate, fit and test
            folder = self.prepare()
            self._note.write_text(str(folder.resolve()))
        self._is_prepared = True

    @override
    def setup(self, stage: str) -> None:
        """Opens what has been prepared."""
        if self._folder is None:
            self._folder = Path(self._note.read_text())
            self.check()

    @property
    def _note(self) -> Path:
        # Which source "auto" means is decided once, by the process that prepares; the others must not ask again.
        return self.cache / f"{hashlib.sha256(repr(sorted(self.hparams.items())).encode()).hexdigest()[:16]}.folder"
