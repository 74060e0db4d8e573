"""The error of the recipes: a mistake in the configuration or in the data, told in one clear sentence."""

from __future__ import annotations

from hydra.errors import InstantiationException

from lightning_pipe.errors import PipeError

# What the Trainer's and the strategy's hints mean on the command line of a recipe.
REMEDIES = {
    "limits the norm of all gradients": "trainer.gradient_clip_val=null, or trainer.gradient_clip_algorithm=value.",
    "No module named": "pip install '.[extras]' in the checkout has all loggers and sweepers.",
    "No supported gpu backend found": "trainer=cpu trains on processes without a GPU.",
}


class RecipeError(PipeError):
    """The configuration or the data cannot be used as they are; the hint says what to change."""


def sentence(error: Exception) -> str | None:
    r"""What a user's mistake is told with; None for any other error.

    The mistake may have been found by another process, whose traceback is then the end of this one's error.

    Example:
        >>> sentence(RecipeError("There is no folder x.", hint="Name another."))
        'There is no folder x.\nHint: Name another.'
        >>> sentence(RuntimeError("Loading failed:\n…\nrecipes.errors.RecipeError: There is no folder x."))
        'There is no folder x.'
        >>> sentence(RuntimeError("out of memory")) is None
        True
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    # what parts of the configuration say of their arguments while they are built
    if isinstance(error, InstantiationException) and isinstance(
        error.__cause__, (PipeError, ValueError, MisconfigurationException, ModuleNotFoundError)
    ):
        return _with_remedy(str(error.__cause__))
    _, mark, told = str(error).rpartition("recipes.errors.RecipeError: ")
    return _with_remedy(told) if mark or isinstance(error, PipeError) else None


def _with_remedy(told: str) -> str:
    remedies = [remedy for words, remedy in REMEDIES.items() if words in told]
    return "\n".join([told, *(f"Here: {remedy}" for remedy in remedies)])
