"""What a run shows and what it keeps to itself: one line per event, no advertisements, no warnings that ask nothing."""

from __future__ import annotations

import logging
import warnings

HARMLESS = (
    ".*does not have many workers.*",  # batches of ready tokens cost nothing to load
    ".*isinstance\\(treespec, LeafSpec\\).*",  # lightning 2.6 under torch 2.13
    ".*The dirpath has changed from.*",  # a resumed run has a folder of its own
    ".*Experiment logs directory .* exists and is not empty.*",  # Hydra has made the folder and its log
)


def tidy() -> None:
    """Sends Lightning's messages through Hydra's handlers only, and drops what a reader need not see."""
    logging.getLogger("lightning").handlers.clear()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(words in text for words in ("Tip:", "TPU available", "Loading `train_dataloader`"))
