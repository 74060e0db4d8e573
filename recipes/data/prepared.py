"""Tokenised text that one process on every machine prepares, in a cache on disk, and all processes then open."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from recipes.data import vocabulary
from recipes.data.loading import ResumableData
from recipes.data.vocabulary import Vocabulary
from recipes.errors import RecipeError


class Prepared(ResumableData):
    """A data module whose data is a folder in a cache, with the tokeniser that its texts were tokenised with.

    Subclasses call ``save_hyperparameters``, tell the cache, name the special tokens by role as for `vocabulary.load`,
    and set for how many tokens the model is built.
    """

    cache: Path
    special: Mapping[str, str]
    vocabulary: int

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._is_prepared = False

    @abstractmethod
    def prepare(self) -> Path:
        """Returns the folder with the data, which is complete."""

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
            vocabulary.check_size(self.words.size, self.vocabulary)

    @property
    def words(self) -> Vocabulary:
        """The tokeniser."""
        return vocabulary.load(self.folder, self.special)

    @property
    def _note(self) -> Path:
        # Which source "auto" means is decided once, by the process that prepares; the others must not ask again.
        return self.cache / f"{hashlib.sha256(repr(sorted(self.hparams.items())).encode()).hexdigest()[:16]}.folder"
