"""The order of shuffled data, for which a DataLoader takes a seed from the global generator when an epoch begins.

Steps leave that generator as it was, so the order depends on the run's seed and the epoch, and a checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, get_rng_state, set_rng_state
from torch.random import fork_rng
from torch.utils.data import RandomSampler

from lightning_pipe.patches import all_replaced

_KEY = "lightning_pipe_data_order"
_NOTE = (
    "the DataLoader shuffles by the global generator, which steps do not advance here: if they draw (dropout), the "
    "order from the second epoch on is another one than on one device; one by DataLoader(generator=…) is the same"
)


class DataOrder:
    """Keeps the state of the generator with which an epoch of a Trainer has begun."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._begun = self._iterated = get_rng_state()
        self._within: Tensor | None = None  # the same of an epoch that is to go on
        self._resumes = True  # no epoch has begun

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the context lasts, note how each epoch begins; one that goes on begins as it did."""
        iterate, take = CombinedLoader.__iter__, CombinedLoader.__next__

        def begin(loader: CombinedLoader) -> CombinedLoader:
            if loader.iterables is not self._trainer.train_dataloader:
                return iterate(loader)
            self._resumes = False
            with fork_rng(devices=[], enabled=self._within is not None):
                if self._within is not None:
                    set_rng_state(self._within)
                self._begun = get_rng_state()
                iterate(loader)
                self._iterated = get_rng_state()
            return loader

        def first(loader: CombinedLoader) -> Any:
            if self._within is None or loader.iterables is not self._trainer.train_dataloader:
                return take(loader)
            self._within = None
            with fork_rng(devices=[]):  # the sampler draws now; Lightning may have made up for a validation meanwhile
                set_rng_state(self._iterated)
                return take(loader)

        with all_replaced([(CombinedLoader, "__iter__", begin), (CombinedLoader, "__next__", first)]):
            yield

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Put the state into a checkpoint that has that of loops."""
        if "loops" in checkpoint:
            ended = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            state = {"begun": None if ended else self._begun, "now": get_rng_state()}
            checkpoint["loops"]["fit_loop"]["state_dict"][_KEY] = state

    def load(self, checkpoint: Any) -> None:
        """Go on from the state of the checkpoint that the run resumes, if that has one.

        Tuners go back to a checkpoint of their own behind their epochs, and draw further orders then.
        """
        if not self._resumes:
            return
        state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get(_KEY)
        if state is not None:
            self._within = state["begun"]
            set_rng_state(state["now"])

    def notes(self) -> tuple[str, ...]:
        """What the plan says."""
        samplers = [getattr(each, "sampler", None) for each in self._trainer.fit_loop._combined_loader.flattened]
        drawn = any(isinstance(each, RandomSampler) and each.generator is None for each in samplers)
        return (_NOTE,) if drawn and self._trainer.max_epochs != 1 else ()
