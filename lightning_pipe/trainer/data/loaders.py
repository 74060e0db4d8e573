"""The loaders that ranks iterate in the place of the user's."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.nonblocking_broadcast import BATCHES, NonBlockingBroadcast


class Loaders:
    """Lets one rank of each pipeline load for all its ranks, and all replicas end after as many batches.

    Args:
        pipeline: the LightningModule over the ranks.
        world: the processes.

    Attributes:
        channel: sends batches within the pipeline.
    """

    def __init__(self, pipeline: Pipeline, world: World) -> None:
        self._trainer: Any = pipeline.module.trainer
        self._pipeline, self._world = pipeline, world
        self.channel = NonBlockingBroadcast(pipeline.transport)

    def loader(self, dataloader: Any) -> Any:
        """The loader that this rank iterates in the place of the user's."""
        loader = dataloader.loader if isinstance(dataloader, SharedDataLoader) else dataloader
        layout, transport = self._world.layout, self._pipeline.transport
        if layout.data_parallel_size > 1 and has_iterable_dataset(loader):
            rank_zero_warn(
                "An IterableDataset is not divided over the pipelines. It must do so itself, by "
                "`trainer.strategy.data_parallel_rank` and `trainer.strategy.data_parallel_size`: the ranks of "
                "torch.distributed count processes, of which a pipeline has several."
            )
        if layout.world_size == 1:
            return loader
        source = transport.peers[self._pipeline.loss_ranks[0]]
        share = partial(self.channel.share, source=source, purpose=BATCHES)
        shared = SharedDataLoader(loader, transport, source, share)
        # Lightning repeats no sample in a prediction, so lengths differ there, and nothing waits for other replicas
        if layout.data_parallel_size > 1 and not self._trainer.predicting:
            lengths = {*transport.all_gather_object(sized_len(shared), self._world.replica_members)}
            shared.compare = self._compare_replicas if None in lengths or len(lengths) > 1 else None
        return loader if layout.world_size == layout.data_parallel_size and shared.compare is None else shared

    def full_batch(self) -> int:
        """Samples of a full training batch; 0 if the loader does not know them."""
        loader = self._trainer.train_dataloader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", 0)
        return size if isinstance(size, int) else 0

    def _compare_replicas(self, batches: int, ended: bool) -> None:
        """Raise if the data of some replicas has ended and that of others has not: these would wait for ever."""
        trainer, prefix = self._trainer, self._trainer.state.stage.dataloader_prefix
        # what Lightning asks for; a part of data of unknown length is all of it
        asked = trainer.num_sanity_val_steps if trainer.sanity_checking else getattr(trainer, f"limit_{prefix}_batches")
        if isinstance(asked, int) and batches - (not ended) >= asked:
            return  # the data is longer than needed; a batch ahead may have been asked for
        if all(self._world.any_of([ended, not ended], self._world.replica_members)):
            replica = self._world.transport.replica
            here = f"replica {replica} has {batches} batches" if ended else f"replica {replica} has {batches} or more"
            raise ConfigurationError(
                f"The replicas' datasets differ in length: {here}, others have {'more' if ended else 'fewer'}.",
                hint="Let every replica's IterableDataset end after as many batches, or set limit_train_batches "
                "(limit_val_batches, ...) to the smallest number.",
            )
