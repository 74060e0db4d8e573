"""One loader per replica: a rank with the last stage loads, and sends its batches to the other ranks of its pipeline.

Every batch is loaded once. Shuffling, random augmentation and worker processes are as they are on one device, whatever
the seeds of the ranks. The loading rank sends the states of the global random generators that have changed since its
last message, and the other ranks take them over.
"""

from __future__ import annotations

import pickle
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor

from lightning_pipe.errors import CommunicationError
from lightning_pipe.lightning_internals import IndexBatchSampler
from lightning_pipe.torch_internals import tree_map
from lightning_pipe.transport.base import Transport

_OWN = frozenset({"loader", "_transport", "_source", "_share", "_length", "_states", "compare"})

_STATEFUL = ("state_dict", "load_state_dict")


class SharedDataLoader:
    """A loader whose batches are the same on all ranks of a pipeline.

    The constructor, ``iter`` and ``next`` are collective over the pipeline. All other attributes are those of the
    wrapped loader. Ranks that do not load never iterate that loader.

    Args:
        loader: any iterable.
        transport: this process's transport.
        source: the process that loads.
        share: sends an object from the source to all ranks of the pipeline.

    Attributes:
        compare: compares with the other replicas after every batch, whose loaders must not end earlier or later: called
            with the number of batches so far, and whether the loader has ended; ``None``: nothing is to be compared.
    """

    compare: Callable[[int, bool], None] | None = None

    def __init__(self, loader: Any, transport: Transport, source: int, share: Callable[[Any], Any]) -> None:
        vars(self).update(loader=loader, _transport=transport, _source=source, _share=share, _states={})
        vars(self)["_length"] = self.share(sized_len(loader) if self.loads else None)
        # Lightning saves the loaders that have these methods by a Protocol, which does not ask __getattr__ from Python
        # 3.12 on.
        vars(self).update({name: getattr(loader, name) for name in _STATEFUL if hasattr(loader, name)})

    @property
    def loads(self) -> bool:
        """Whether this process is the one that loads."""
        return bool(self._transport.process == self._source and self._transport.topology.tensor_rank == 0)

    def share(self, message: Any) -> Any:
        """The message of the process that loads, on all ranks."""
        topology = self._transport.topology
        if topology.tensor > 1 and self._transport.process == self._source:
            members = topology.tensor_processes(self._source)
            message = self._transport.broadcast_object(message, members[0], members)
        return self._share(message)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(())

        def begin() -> tuple[Any, ...]:
            nonlocal iterator
            iterator = iter(self.loader)
            return "start", sized_len(self.loader), None

        _, vars(self)["_length"], _ = self._loaded(begin)
        sampler = getattr(self.loader, "batch_sampler", None)
        if isinstance(sampler, IndexBatchSampler) and not self.loads:
            sampler.seen_batch_indices = []
        return self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # as where they are loaded, or the host would wait for their way to the device
        pins = not self.loads and getattr(self.loader, "pin_memory", False) and self._transport.device.type == "cuda"
        for number in count():
            what, batch, indices = self._loaded(partial(self._next, iterator, number))
            ended = what == "stop"
            if self.compare is not None:
                self.compare(number if ended else number + 1, ended)
            if ended:
                return
            if indices is not None and not self.loads:
                self.loader.batch_sampler.seen_batch_indices.append(indices)
            yield tree_map(_pinned, batch) if pins else batch

    def _next(self, iterator: Iterator[Any], number: int) -> tuple[Any, ...]:
        """The next batch, and its places in the dataset where a prediction asks."""
        try:
            batch = next(iterator)
        except StopIteration:
            return "stop", None, None
        sampler = getattr(self.loader, "batch_sampler", None)
        # worker processes are ahead of the batch that is due
        indices = sampler.seen_batch_indices[number] if isinstance(sampler, IndexBatchSampler) else None
        return "batch", batch, indices

    def _loaded(self, load: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What some code returns where it loads, on all ranks, with the random states that are new."""
        if not self.loads:
            *message, states = self.share(None)
            if message[0] == "error":
                raise CommunicationError(f"Loading failed on {self._transport.describe(self._source)}:\n{message[1]}")
            _set_random_states(states)
            return tuple(message)
        try:
            loaded = load()
        except Exception as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            with suppress(CommunicationError):  # the loader's own error is what counts
                self.share(("error", text, None, None))
            raise
        before, vars(self)["_states"] = self._states, _random_states()
        self.share((*loaded, {name: state for name, state in self._states.items() if state != before.get(name)}))
        return loaded

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length.")
        return int(self._length)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if type(leaf) is Tensor and leaf.is_cpu and leaf.layout is torch.strided else leaf


def _random_states() -> dict[str, Any]:
    """The states of the global generators, as values that ``==`` compares: it knows no tensors and no arrays."""
    numpy = pickle.dumps(np.random.get_state(legacy=False))  # Python's would take far longer
    return {"torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate(), "numpy": numpy}


def _set_random_states(states: dict[str, Any]) -> None:
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(pickle.loads(states["numpy"]))
