"""Prepared texts whose folder has the tokeniser as well."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from recipes.data import vocabulary
from recipes.data.prepared import Prepared
from recipes.data.vocabulary import Vocabulary


class PreparedText(Prepared):
    """A data module whose folder has the tokeniser that its texts were tokenised with.

    Subclasses name the special tokens, by role as for `vocabulary.load`, and set for how many tokens the model is
    built.
    """

    special: Mapping[str, str]
    vocabulary: int

    @override
    def check(self) -> None:
        vocabulary.check_size(self.words.size, self.vocabulary)

    @property
    def words(self) -> Vocabulary:
        """The tokeniser."""
        return vocabulary.load(self.folder, self.special)
