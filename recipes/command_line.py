"""What Hydra reads in each process of a job, and what a run shows.

Lightning starts the other processes of a job with the first one's folder. Where something else starts them (torchrun,
SLURM, and in sweeps), every process reads the whole command line, and only the first one may write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

from hydra.errors import ConfigCompositionException, OverrideParseException

from recipes import config
from recipes.config import CONF
from recipes.errors import RecipeError

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
HARMLESS = (
    ".*does not have many workers.*",  # batches of ready tokens cost nothing to load
    ".*isinstance\\(treespec, LeafSpec\\).*",  # lightning 2.6 under torch 2.13
    ".*The dirpath has changed from.*",  # a resumed run has a folder of its own
    ".*Experiment logs directory .* exists and is not empty.*",  # Hydra has made the folder and its log
)


def rank() -> int:
    """The number of this process in its job as the launcher has told it: 0 where nothing has been said."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def arguments(command_line: Sequence[str]) -> list[str]:
    """What Hydra shall read in this process.

    Args:
        command_line: what this process was started with, without the program's name.

    Returns:
        on the first process of a job the command line; on the others the same without any output of their own.

    Example:
        >>> arguments(["+experiment=e", "+trainer.profiler=simple", "-m"])
        ['experiment=e', '++trainer.profiler=simple', '-m']
    """
    given = [_added(word) for word in command_line]
    if rank() == 0:
        return given
    quiet = ["hydra.output_subdir=null", "hydra.job_logging.root.level=WARNING"]
    if not any(word.startswith("hydra.run.dir=") for word in given):  # rank 0's folder is not known here
        quiet += ["hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=."]
        quiet += ["hydra.job_logging.root.handlers=[console]"]
    return [*given, *quiet]


def _added(word: str) -> str:
    """``+key`` adds a key. All keys are there already, and so are the groups: it means the same as without the plus."""
    key = re.match(r"\+([\w/]+(?:@[\w.]+)?|[\w.]+)=", word)
    if key is None:
        return word
    return word[1:] if (CONF / key[1]).is_dir() else f"+{word}" if "@" not in key[1] else word


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Sets the threads of this process and of those that it starts.

    Args:
        number: for each process; ``None`` leaves it to torch.
    """
    import torch

    before = os.environ.get("OMP_NUM_THREADS")
    if number is not None:
        os.environ["OMP_NUM_THREADS"] = str(number)  # Lightning's launcher would set another number
        torch.set_num_threads(number)
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def run(command: Callable[[], None], *words: str) -> None:
    """Runs a command of Hydra's with `arguments`; a mistake of the user's ends with a sentence.

    Args:
        command: what `hydra.main` has made.
        words: that stand before those of the command line.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    config.register()
    try:
        sys.argv[1:] = [*words, *arguments(sys.argv[1:])]
        command()
    except (ConfigCompositionException, OverrideParseException) as error:
        sys.exit(str(config.explain(error)))
    except RecipeError as error:
        sys.exit(str(error))


def tidy() -> None:
    """Sends Lightning's messages through Hydra's handlers only, and drops what a reader need not see."""
    logging.getLogger("lightning").handlers.clear()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(words in text for words in ("Tip:", "TPU available", "Loading `train_dataloader`"))
