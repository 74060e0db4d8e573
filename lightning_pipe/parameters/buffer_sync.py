"""Buffers that forward passes change: kept equal on all processes that hold them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.kept_state import in_several_pipes
from lightning_pipe.intercept.tensor_state import same_values
from lightning_pipe.torch_internals import BatchNorm
from lightning_pipe.transport.base import Transport


class BufferSync:
    """Keeps buffers that forward passes change equal on all processes that hold them.

    Each process sees samples of its own. After every batch all have the values of the first process, as with the
    ``broadcast_buffers`` of ``DistributedDataParallel``. The first training batch shows which buffers change. Batch
    norm is left out: it has an option of its own.

    A buffer, also one that the step changes outside the layers, changes once for every micro-batch, and on one device
    once for the batch: a warning says so. Several ranks of a pipeline do not have one of a layer in common: each would
    see a part of the micro-batches.

    Args:
        module: the user's module.
        layers: dotted names of the layers.
        transport: reaches the other processes.
        owners: ``owners(name)``: the ranks of a pipeline that hold a buffer.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[str], transport: Transport, owners: Callable[[str], tuple[int, ...]]
    ) -> None:
        self._module, self._transport, self._owners = module, transport, owners
        self._layers = tuple(f"{name}." for name in layers)
        self._changing: list[str] = []

    def agree(self, before: Mapping[str, Tensor], micro_batches: int) -> None:
        """After the first batch. Collective.

        Args:
            before: the `buffer_values` before it.
            micro_batches: of the batch.

        Raises:
            CutError: several ranks of a pipeline hold one that changes. Mostly the layer has raised that already.
        """
        changed = list(_changed(self._module, before))
        # A rank sees the changes of its own layers alone.
        everyone = self._transport.topology.same_tensor_rank
        gathered = self._transport.all_gather_object(changed, everyone)
        found = sorted({name for theirs in gathered for name in theirs})
        self._changing = [name for name in found if name.startswith(self._layers) and len(self._members(name)) > 1]
        if (copied := next((name for name in self._changing if len(self._owners(name)) > 1), None)) is not None:
            raise in_several_pipes(f"self.{copied}", "a forward pass")
        if found and micro_batches > 1 and self._transport.process == 0:
            warnings.warn(
                f"'{found[0]}' ({len(found)} such buffers) is changed by forward passes: {micro_batches} times in a "
                "batch, with a micro-batch each, where one device changes it once, with the whole batch. Sums and "
                "counts are the same, averages and power iterations (spectral norm) are not, nor is what is computed "
                "from them; with micro_batches=1 all is.",
                stacklevel=2,
            )

    def equalise(self) -> None:
        """After every batch. Collective over the holders of each buffer."""
        if not self._changing:
            return
        buffers = dict(self._module.named_buffers())
        for name in self._changing:
            members = self._members(name)
            if self._transport.process in members and len(members) > 1:
                data = buffers[name].detach().contiguous()
                self._transport.broadcast(data, members[0], members).wait()
                # By .data: a change that counts would make autograd refuse graphs that have saved the buffer.
                buffers[name].data.copy_(data)

    def _members(self, name: str) -> tuple[int, ...]:
        return self._transport.topology.holders(self._owners(name))


class EvaluatedCopies:
    """Gives all copies of a module the buffers that an evaluation has changed in one of them.

    Every rank holds the modules outside the layers, and one of them runs them. Bidirectional schedules hold each stage
    on two ranks, and evaluate batches in the pipe that ends on rank 0. Counts and caches that a module keeps there
    would be old on the other ranks, which train with them, or from which the next run starts.

    Args:
        module: the user's module.
        transport: reaches the other processes.
        members: the processes of this pipeline.
        not_told: the dotted names of layers of which this process tells nothing: it alone has them, or another one
            evaluates them. The step may have changed their buffers here, and that may have been put back.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, members: tuple[int, ...], not_told: Iterable[str] = ()
    ) -> None:
        self._module, self._transport, self._members = module, transport, members
        self._not_told = tuple(f"{name}." for name in not_told)
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before the first batch."""
        values = buffer_values(self._module)
        # what the step has made of the outermost module's own comes with its report
        self._before = {name: value for name, value in values.items() if "." in name}

    def end(self) -> None:
        """Behind the last one. Collective over the pipeline."""
        found = _changed(self._module, self._before)
        changed = {name: value for name, value in found.items() if not name.startswith(self._not_told)}
        self._before = {}
        gathered = self._transport.all_gather_object(changed, self._members)
        buffers = dict(_buffers(self._module))
        for theirs in gathered:
            for name in (theirs.keys() & buffers.keys()) - changed.keys():
                owner, _, own_name = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[own_name] = theirs[name].to(buffers[name].device)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of layers and other modules that this process has; batch norm has an option of its own."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if not isinstance(part, BatchNorm) and not isinstance(buffer, AbsentTensor):
                yield name, buffer


def buffer_values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers: nobody counts changes of their ``.data``."""
    return {name: buffer.detach().clone() for name, buffer in _buffers(module)}


def _changed(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that have other values than before."""
    now = dict(_buffers(module))
    return {name: now[name] for name, value in before.items() if name in now and not same_values(now[name], value)}
