"""What the ranks of a pipeline have in common: a batch, and what the last stage makes of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pipe.engine.batch_kinds import kind_of
from lightning_pipe.engine.containers import children, map_leaves
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.plain.step_traces import StepTraces, TracesOfBatch

Step = Callable[[Any], Any]
"""Takes a micro-batch, calls the model, and returns what the user wants of it; in training the loss."""
_SAMPLED = 1 << 14
"""Elements of a tensor on an accelerator that are compared, evenly spread: comparing all would take a copy of it."""


def shared(batches: Sequence[Any] | None, pipeline: Pipeline) -> list[Any]:
    """The same batches on all ranks of a pipeline, on their devices. Collective over the pipeline.

    Args:
        batches: what this rank has loaded; ``None``: others have.
        pipeline: the model over the ranks.

    Raises:
        ConfigurationError: no rank has any, or they are not the same on all that have.
    """
    transport, members = pipeline.transport, pipeline.pipeline_members
    alone = len(members) == 1  # nobody has another batch
    own = None if batches is None else [None if alone else fingerprint(each) for each in batches]
    gathered = zip(members, transport.all_gather_object(own, members), strict=True)
    having = {process: found for process, found in gathered if found is not None}
    if not having:
        raise ConfigurationError("There is no batch on any rank of the pipeline.", hint="Pass it on one rank, or all.")
    first = min(having)
    for process, found in having.items():
        if found != having[first]:
            raise ConfigurationError(
                f"{transport.describe(first).capitalize()} and {transport.describe(process)} have different batches; "
                "the ranks of a pipeline work on the same one.",
                hint="Deal samples out to replicas alone: DistributedSampler(dataset, pipeline.data_parallel_size, "
                "pipeline.data_parallel_rank). Where loading draws random numbers, load on one rank, and pass None on "
                "the others.",
            )
    if len(having) < len(members):
        batches = transport.broadcast_object(batches, first, members)
    return [map_leaves(lambda leaf: _placed(leaf, transport.device), batch) for batch in batches or ()]


def fingerprint(batch: Any) -> Any:
    """What is equal for equal batches, in all processes; of objects of unknown structure only the type counts.

    Example:
        >>> fingerprint({"x": torch.ones(2)}) == fingerprint({"x": torch.zeros(2)})
        False
    """
    contents = children(batch)
    if contents is not None:
        return [(str(key), fingerprint(child)) for key, child in contents.items()]
    if isinstance(batch, np.ndarray) and not batch.dtype.hasobject:
        return batch.shape, str(batch.dtype), zlib.crc32(batch.tobytes())
    if not isinstance(batch, Tensor):
        return repr(batch) if isinstance(batch, int | float | str | bytes) else type(batch).__qualname__
    values: Any = b""
    if batch.layout is torch.strided and not batch.is_nested:
        flat = batch.detach().resolve_conj().resolve_neg().reshape(-1)
        flat = flat if flat.is_cpu else flat[:: 1 + flat.numel() // _SAMPLED].cpu()
        values = flat.contiguous().as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data  # one has any stride
    return tuple(batch.shape), str(batch.dtype), zlib.crc32(values)


def _placed(leaf: Any, device: torch.device) -> Any:
    """Tensors, and objects that can be moved as tensors are, on a device."""
    return leaf.to(device) if isinstance(leaf, Tensor) or (kind_of(leaf) and hasattr(leaf, "to")) else leaf


class SharedStep:
    """Runs steps over a pipeline: the runs of the last stage count, on all ranks, and all others are undone.

    Args:
        pipeline: the model over the ranks.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._traces = pipeline, StepTraces(pipeline)
        self._metrics = {name: part for name, part in pipeline.module.named_modules() if isinstance(part, Metric)}

    def run(
        self,
        step: Step,
        call: Callable[[Callable[[int, Any], Any]], dict[int, Any] | None],
        micro_batches: int,
        *,
        may_repeat: bool = False,
    ) -> dict[int, Any]:
        """Run a step for all micro-batches, and share what the ranks with the last stage made of it.

        Args:
            step: the user's.
            call: calls the pipeline with the step that it takes; ``None``: it has come back to an earlier stage.
            micro_batches: how many there are.
            may_repeat: whether the step may come back to the layers of an earlier stage, and end there on all ranks.

        Returns:
            What the step returned for each micro-batch; less where it came back to layers of an earlier stage.

        Raises:
            CutError: the step has changed what cannot be changed alike on all ranks.
        """
        pipeline, transport = self._pipeline, self._pipeline.transport
        traces = TracesOfBatch(micro_batches, may_repeat=may_repeat)
        before = self._traces.capture() if pipeline.is_loss_rank else None
        if may_repeat:  # layers have run for the batches then
            computing = pipeline.executor.stages.interceptor.state.root_of
            traces.before.append(Snapshot({str(id(part)): part for part in computing}, buffers=False))

        def run(_: int, micro_batch: Any) -> Any:
            def complete() -> Any:
                result = step(micro_batch)
                pipeline.returning(result)
                return result

            return self._traces.run_or_undo(complete, traces, None, lambda: nullcontext({0: Snapshot(self._metrics)}))

        with self._traces.hooks.installed():
            outputs = call(run)
        alone = len(pipeline.pipeline_members) == 1
        changes = self._traces.changes(None if alone or outputs is None else before)
        if outputs is None:
            outputs = {}
            traces.undo()
        if alone:
            return outputs
        report = outputs, changes, traces.left()
        sources = [transport.peers[rank] for rank in pipeline.loss_ranks]
        reports = [transport.broadcast_object(report, each, pipeline.pipeline_members) for each in sources]
        self._traces.adopt([changes for _, changes, _ in reports], before)
        traces.put_back(max((left for *_, left in reports), key=len))
        return {index: output for found, *_ in reports for index, output in found.items()}
