"""Tensors that forward passes change: buffers are kept equal on all processes that hold them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_pipe.config import is_thorough
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.tensor_state import same_values, version_of
from lightning_pipe.local_parts import local
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
from lightning_pipe.torch_internals import BatchNorm
from lightning_pipe.transport.base import Transport


class BufferSync:
    """Keeps buffers that forward passes change equal on all processes that hold them.

    Each process sees samples of its own. After every batch all have the values of the first process, as with the
    ``broadcast_buffers`` of ``DistributedDataParallel``. The first training batches, and later ones, show which change.
    Deferred batch norm is left out, whose statistics are those of all; others may have several holders in a pipeline.
    What the step decides, such as buffers of the LightningModule, other ranks get from the one with the last stage.

    A tensor, also one that the step changes outside the layers, changes once for every micro-batch, and on one device
    once for the batch: a warning says so. Parameters that change (averages of codes, rows of tables with ``max_norm``)
    belong to one process, and other buffers to one rank of a pipeline: others would see other samples.

    Args:
        module: the user's module.
        decided: the names of modules whose buffers the complete run of a step decides.
        transport: reaches the other processes.
        owners: ``owners(name)``: the ranks of a pipeline that hold a buffer.
    """

    def __init__(
        self, module: nn.Module, decided: Container[str], transport: Transport, owners: Callable[[str], tuple[int, ...]]
    ) -> None:
        self._module, self._decided, self._transport, self._owners = module, decided, transport, owners
        self._batches = 0
        self._before: dict[str, Tensor] | None = None
        self._known, self._changing = set[str](), dict[str, tuple[int, ...]]()

    def begin(self) -> None:
        """Before a batch."""
        self._batches += 1
        self._before = marks(self._module) if is_thorough(self._batches) else None

    def agree(self, micro_batches: int) -> None:
        """After a batch of so many micro-batches. Collective.

        Raises:
            CutError: one that changes has several holders. Of buffers that several pipes hold layers mostly tell.
        """
        if self._before is None:
            return
        topology, now = self._transport.topology, marks(self._module)
        parameters = {name for name, _ in self._module.named_parameters()}
        sums = {name: float(now[name][-1]) if name in parameters else 0.0 for name in _differing(now, self._before)}
        # A rank sees the changes of its own layers alone.
        gathered = self._transport.all_gather_object(sums, topology.same_tensor_rank)
        of_processes = dict(zip(topology.same_tensor_rank, gathered, strict=True))
        found = sorted({name for theirs in gathered for name in theirs})
        own = {name for name in found if name not in parameters and name.rpartition(".")[0] in self._decided}
        owners = {name: (topology.loss_rank,) if name in own else self._owners(name) for name in found}
        members = {name: topology.holders(ranks) for name, ranks in owners.items()}
        shared = [name for name in found if len(members[name]) > 1]
        # what changes alike on all holders, as by a mask, stays equal
        apart = {n for n in parameters.intersection(shared) if len({of_processes[p].get(n) for p in members[n]}) > 1}
        buffers = [name for name in shared if name not in parameters]
        self._changing |= {name: members[name] for name in buffers}
        norms = ((path, part) for path, part in self._module.named_modules() if isinstance(part, BatchNorm))
        statistics = {f"{path}.{name}".lstrip(".") for path, part in norms for name in part._buffers}
        apart |= {name for name in buffers if len(owners[name]) > 1} - statistics
        if held := min(apart, default=None):
            raise CutError(
                f"a forward pass changes `self.{held}`, which several processes hold, and each by samples of its own.",
                hint="Change it in a hook, such as on_train_batch_end (weight.data.renorm_(2, 0, limit) for max_norm), "
                "or use one pipeline with a schedule of one pipe, such as '1f1b', in which one rank runs the module.",
            )
        new = [name for name in found if name not in self._known | statistics]
        self._known.update(new)
        if new and micro_batches > 1 and self._transport.process == 0:
            warnings.warn(
                f"'{new[0]}' ({len(new)} such tensors) is changed by forward passes: {micro_batches} times in a "
                "batch, with a micro-batch each, where one device changes it once, with the whole batch. Sums, counts "
                "and limits (max_norm) are the same, averages and power iterations (spectral norm) are not, nor is "
                "what is computed from them; with micro_batches=1 all is.",
                stacklevel=2,
            )

    def equalise(self) -> None:
        """After every batch. Collective over the holders of each buffer."""
        buffers = dict(self._module.named_buffers()) if self._changing else {}
        for name, members in self._changing.items():
            if self._transport.process in members:
                data = buffers[name].detach().contiguous()
                self._transport.broadcast(data, members[0], members).wait()
                # By .data: a change that counts would make autograd refuse graphs that have saved the buffer.
                buffers[name].data.copy_(data)


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
        # what the step has made of the outermost module's own comes with its report
        self._before = {name: each.detach().clone() for name, each in _buffers(self._module) if "." in name}

    def end(self) -> None:
        """Behind the last one. Collective over the pipeline."""
        buffers, before, self._before = dict(_buffers(self._module)), self._before, {}
        told = [name for name in _differing(buffers, before) if not name.startswith(self._not_told)]
        gathered = self._transport.all_gather_object({name: buffers[name] for name in told}, self._members)
        for theirs in gathered:
            for name in (theirs.keys() & buffers.keys()).difference(told):
                owner, _, own_name = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[own_name] = theirs[name].to(buffers[name].device)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of layers and other modules that this process has; deferred batch norm has statistics of all."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if not isinstance(part, DeferredBatchNorm) and not isinstance(buffer, AbsentTensor):
                yield name, buffer


def marks(module: nn.Module) -> dict[str, Tensor]:
    """What tells of changes: copies of buffers; which object a parameter is, how often it changed, and its sum."""
    found = {name: buffer.detach().clone() for name, buffer in _buffers(module)}
    for name, each in module.named_parameters():
        if not isinstance(each, AbsentTensor):
            value = local(each).detach()
            # nobody counts changes of ``.data``; complex numbers, eight bits and types of others may have no such sum
            sums = type(value) is Tensor and value.is_floating_point() and value.dtype.itemsize > 1
            # in pieces: of another type a sum in this one begins with a copy
            parts = torch.split(value.ravel(), 1 << 22) if sums else ()
            # of what has no sum nobody knows whether holders have changed it alike: no number is equal to another one
            total = sum(float(part.double().sum()) for part in parts) if sums else math.nan
            found[name] = torch.tensor((id(each), version_of(each) or 0, total), dtype=torch.float64)
    return found


def _differing(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> list[str]:
    """The names of what has other values than before."""
    return [name for name, value in before.items() if name in now and not same_values(now[name], value)]
