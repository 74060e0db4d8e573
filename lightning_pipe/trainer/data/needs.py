"""Which tensors of a batch each rank needs: learnt in the first batch, known to the rank that loads.

The first batch of a loop goes whole to all ranks. Each notes what its runs of the step read of it, and tells the rank
that loads, which waits for that at the end of its own run. Later batches go in as many versions as ranks differ in what
they need, with a stand-in (`Withheld`) in the place of each other large tensor::

    rank 2 (stage 0)   whole: reads images      |            images, stand-in
    rank 1 (stage 1)   whole: reads neither     | tell -->   stand-in, stand-in
    rank 0 (stage 2)   whole: reads labels      |            loads and has both

A batch of another structure is another first batch, and so is the first one of every pass over the data. A rank on
which anything else looks at batches, such as hooks of the user's, asks for whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_pipe.engine.batch_kinds import kind_of
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.stage import Stages
from lightning_pipe.intercept.batch_reads import BatchReads
from lightning_pipe.intercept.withheld import Withheld
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import (
    is_compiled,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)
from lightning_pipe.trainer.broadcasts import NEEDS
from lightning_pipe.trainer.data.batch_hooks import are_looked_at
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast

LEAST = 1 << 14
"""Bytes of the smallest tensor that is left out: what names a smaller one is not much shorter."""

Key = tuple[str, str]
"""The method that runs a batch, and the structure of the batch."""


class Learning:
    """Sees what the runs of a batch's step read of it, and tells the rank that loads.

    Args:
        stages: run the step; ``None``: there is nothing to learn.
        tell: is given the positions of the tensors that were read.
    """

    def __init__(self, stages: Stages | None, tell: Callable[[set[int]], None]) -> None:
        self._stages, self._tell, self._reads = stages, tell, BatchReads()

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """Around runs of the step."""
        if self._stages is None:
            yield
            return
        self._stages.reads = self._reads
        try:
            yield
        finally:
            self._stages.reads = None

    def end(self) -> None:
        """After the last run on this rank. The rank that loads waits for the others."""
        if self._stages is not None:
            self._tell(self._reads.positions)


_NOTHING_TO_LEARN = Learning(None, lambda _: None)


class Needs:
    """Learns and knows which tensors of a batch the ranks of a pipeline need.

    Args:
        module: the LightningModule, with its Trainer.
        pipeline: the module over the ranks.
        whole: whether all ranks are to get whole batches; the same on all ranks.
    """

    def __init__(self, module: pl.LightningModule, pipeline: Pipeline, *, whole: bool) -> None:
        self._module, self._pipeline = module, pipeline
        # without a flush a batch passes the ranks in several calls of the step; several passes read it several times
        self._off = whole or len(pipeline.pipeline_members) == 1 or not pipeline.synchronous or pipeline.passes > 1
        self._channel = NonBlockingBroadcast(pipeline.transport, ahead=2, number=NEEDS)
        self._whole = set[str]()
        # in this pass: of which structures a batch has been sent, and of which a step has told what it reads
        self._begun, self._told = set[Key](), set[Key]()
        self._read: dict[Key, set[int]] = {}
        self._needed: dict[Key, dict[int, set[int]]] = {}

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    # ------------------------------------------------------------------ on all ranks

    def begin_pass(self) -> None:
        """A loader is about to be iterated: the first batch is whole again. At the same place on all ranks."""
        name, _ = _under_way(self._trainer)
        self._told = {key for key in self._told if key[0] != name}
        self._begun = {key for key in self._begun if key[0] != name}

    def keep_whole(self, name: str) -> None:
        """Batches of a method are whole from now on: it reads them in a way that is not seen. On all ranks."""
        self._whole.add(name)

    def learning(self, name: str, batch: Any, parts: Sequence[Any]) -> Learning:
        """What learns from the runs of the step of a batch. For all batches in their order, the same on all ranks.

        Args:
            name: the method that runs it.
            batch: the batch, as the step gets it.
            parts: its micro-batches.
        """
        structure = _structure(batch)
        key = (name, structure)
        # before the module is divided, one rank runs all of it
        if self._off or self._pipeline.whole or name in self._whole or key in self._told:
            return _NOTHING_TO_LEARN
        self._told.add(key)
        # positions in the one are those in the other, unless something cuts itself, which needs its values for that
        cut_themselves = any(map(kind_of, tree_leaves(batch, is_leaf=lambda node: kind_of(node) is not None)))
        alike = all(_structure(part) == structure for part in parts) and not cut_themselves
        everything = set(range(len(tree_leaves(batch))))

        def tell(read: set[int]) -> None:
            if name in self._whole:
                return
            seen = self._read.setdefault(key, set())
            seen |= read
            seen_whole = alike and not are_looked_at(self._module, name) and not self._is_compiled
            self._tell(key, seen if seen_whole else everything)

        return Learning(self._pipeline.executor.stages, tell)

    def _tell(self, key: Key, read: set[int]) -> None:
        """Tell the rank that loads; it waits for all others, which have run the same batch or are about to."""
        pipeline, source = self._pipeline, self._pipeline.loss_process
        process, told = pipeline.transport.process, (key, read)
        others = [each for each in pipeline.pipeline_members if each != source]
        if process == source:
            answers = {each: self._channel.share(None, each, (source, each)) for each in others}
            if all(theirs == key for theirs, _ in answers.values()):
                self._needed[key] = {each: needed for each, (_, needed) in answers.items()}
        else:
            self._channel.share(told, process, (source, process))
            self._channel.end_call()

    @property
    def _is_compiled(self) -> bool:
        """Whether code around the layers is compiled: what it reads cannot be seen."""
        inside = {id(part) for _, layer in self._pipeline.layers for part in layer.modules()}
        return any(is_compiled(part) for part in self._module.modules() if id(part) not in inside)

    # ------------------------------------------------------------------ on the rank that loads

    def versions(self, iterator: object, batch: Any) -> Mapping[int, Any]:
        """What to send of a batch, by process; nothing: it goes whole to all of them.

        Args:
            iterator: the loader's iterator, of which Lightning's loop or somebody else has asked for the batch.
            batch: the batch.
        """
        name, loop = _under_way(self._trainer)
        if self._off or name in self._whole or not any(map(_may_be_left_out, tree_leaves(batch))):
            return {}
        if not _is_asked_by(loop, iterator):
            return {}
        key = (name, _structure(batch))
        needed = self._needed.get(key)
        if needed is None or key not in self._begun:
            self._begun.add(key)
            return {}
        return versions_of(batch, needed)


def versions_of(batch: Any, needed: Mapping[int, Set[int]]) -> Mapping[int, Any]:
    """What to send of a batch to processes that do not need all of it.

    Args:
        batch: the batch.
        needed: the positions of the tensors that a process needs among the leaves, by process.

    Returns:
        By process the batch with stand-ins; the same object for processes that need the same.
    """
    pairs, tree = tree_flatten_with_path(batch)
    large = {at for at, (_, leaf) in enumerate(pairs) if _may_be_left_out(leaf)}
    left_out = {process: frozenset(large - needs) for process, needs in needed.items()}
    made = {
        positions: tree_unflatten(
            [_stand_in(path, leaf) if at in positions else leaf for at, (path, leaf) in enumerate(pairs)], tree
        )
        for positions in set(left_out.values())
    }
    return {process: made[positions] for process, positions in left_out.items() if positions}


def _under_way(trainer: Any) -> tuple[str, Any]:
    """The method that runs the batches which are being fetched, and the loop."""
    if trainer.training:
        return "training_step", trainer.fit_loop
    if trainer.state.fn == TrainerFn.FITTING:
        return "validation_step", trainer.fit_loop.epoch_loop.val_loop
    if trainer.validating:
        return "validation_step", trainer.validate_loop
    return ("test_step", trainer.test_loop) if trainer.testing else ("predict_step", trainer.predict_loop)


def _is_asked_by(loop: Any, iterator: object) -> bool:
    """Whether a loop of Lightning's iterates this loader alone: code of the user's that does so gets whole batches."""
    loader = loop._combined_loader
    running = None if loader is None or len(loader.flattened) != 1 else loader._iterator
    return running is not None and any(each is iterator for each in running.iterators)


def _structure(batch: Any) -> str:
    """What a rank must read alike: containers, and what kind of leaf there is where."""
    leaves, tree = tree_flatten(batch)
    return f"{tree} {[leaf.ndim if isinstance(leaf, Tensor) else type(leaf).__qualname__ for leaf in leaves]}"


def _stand_in(path: Any, leaf: Tensor) -> Withheld:
    return Withheld(TensorSpec.of(leaf), f"batch{keystr(path)}")


def _may_be_left_out(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor that is worth it."""
    plain = type(leaf) is Tensor and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)
    return plain and leaf.device.type == "cpu" and not leaf.requires_grad and leaf.nbytes >= LEAST
