"""The error of the recipes: a mistake in the configuration or in the data, told in one clear sentence."""

from __future__ import annotations

from lightning_pipe.errors import PipeError


class RecipeError(PipeError):
    """The configuration or the data cannot be used as they are; the hint says what to change."""
