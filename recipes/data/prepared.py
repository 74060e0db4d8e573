"""Tokenised text that one process on every machine prepares, in a cache on disk, and all processes then open."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from recipes.data import choice, vocabulary
from recipes.data.loading import ResumableData
from recipes.data.vocabulary import Vocabulary
from recipes.errors import RecipeError


@dataclass(kw_only=True, eq=False, repr=False)
class Prepared(ResumableData):
    """A data module whose data is a folder in a cache, with the tokeniser that its texts were tokenised with.

    Subclasses name the special tokens by role as for `vocabulary.load`.

    Args:
        source: what is read; "auto" takes ``files`` where they are given, else the hub where it answers, else a
            stand-in.
        files: folder with local files.
        name: data set on the hub.
        vocabulary: number of tokens for which the model is built.
        tokenizer: a ready tokeniser, by its name on the hub or its folder; None trains one on the texts.
        cache: folder for tokenised texts.
    """

    source: str
    files: str | None = None
    name: str
    vocabulary: int
    tokenizer: str | None = None
    cache: str = "data"
    special: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.save_hyperparameters()
        self._prepared: Path | None = None
        self._folder: Path | None = None

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
        """Runs in one process on every machine, so that the others find the data in the cache."""
        if self._prepared is None:  # the Trainer asks before each of validate, fit and test
            self._prepared = self.prepare()

    @override
    def setup(self, stage: str) -> None:
        """Opens what has been prepared: on all processes the same, which may not ask the hub by themselves."""
        if self._folder is None:
            self._folder = choice.agreed(self.trainer, lambda: self._prepared or self.prepare())
            vocabulary.check_size(self.words.size, self.vocabulary)

    @property
    def words(self) -> Vocabulary:
        """The tokeniser."""
        return vocabulary.load(self.folder, self.special)
