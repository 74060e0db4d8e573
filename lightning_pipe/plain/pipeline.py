"""A model over the ranks of a pipeline, for training loops of the user's own. No trainer is needed, and none known.

What one call of `Pipeline.train` does, on every rank::

    the batch     compared with those of the other ranks, or sent to them      plain/sharing.py
                  cut into micro-batches, with the weight of each loss         batches/batch_splitter.py
    the step      runs for each micro-batch and stage of this rank; a run
                  ends where another rank goes on, and is undone               engine/
    gradients     summed over all that hold a parameter, then added to
                  ``parameter.grad`` at once, with the hooks                   engine/withheld_gradients.py
    the loss      of the batch, and what else the last stage made of it,
                  goes to all ranks
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from os import PathLike
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from lightning_pipe import schedules
from lightning_pipe.batches.batch_splitter import BatchSplitter
from lightning_pipe.batches.micro_batches import LossWeight
from lightning_pipe.batches.outputs import losses_on_host, of_batch
from lightning_pipe.batches.split_batch import SplitBatch
from lightning_pipe.config import Auto, RankOrder, check_options
from lightning_pipe.construction import check_all_set, initialise_meta
from lightning_pipe.engine.pipeline import Pipeline as Engine
from lightning_pipe.engine.refusals import check_module
from lightning_pipe.engine.stage import loss_of
from lightning_pipe.engine.whole_gradients import gradient_norm, unscaling_together
from lightning_pipe.engine.withheld_gradients import withheld_gradients
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.intercept.random_streams import mix
from lightning_pipe.parameters.deferred_batchnorm import check_norms
from lightning_pipe.parameters.loading import load_held
from lightning_pipe.partition import Balance, divide, find_layers
from lightning_pipe.plain.sharing import SharedStep, Step, shared
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.transport.arrangement import arrange, open_transport, topology_of

_DIVIDED: WeakSet[nn.Module] = WeakSet()  # the models of pipelines with all their parts


class Pipeline:
    """Trains an unmodified model as a pipeline, in a loop of the user's own.

    Start the loop on several processes (``torchrun``, Fabric, Accelerate): every process builds the same model, makes
    a Pipeline of it, and makes the same calls. In one process all stages run one after the other, and no process group
    is needed. `PipeStrategy` explains the options that both have.

    Args:
        model: the whole model; each rank keeps the layers of its own stages alone.
        schedule: a registered name, a schedule object, or the path of a CSV file; none without a flush.
        micro_batches: how many a batch is cut into; ``"auto"``: up to four per rank, or 16 samples in each where batch
            norm is in training.
        pipeline_parallel_size: ranks in one pipeline; ``"auto"``: all processes that there are.
        data_parallel_size: pipelines side by side, each with batches of its own; ``"auto"``: 1.
        stages: number of stages; ``"auto"``: ranks x the schedule's stages per rank.
        layers: where the layers are: a dotted path or several in order, with wildcards; ``None`` finds them.
        balance: ``"auto"`` or ``"parameters"``, ``"flops"``, a list of layers per stage, or a function of a layer.
        recompute: whether stages keep only their input: ``"never"``, ``"always"``, or ``"except_last"``.
        deferred_batch_norm: let batch norm keep the statistics of whole batches rather than of micro-batches.
        loss_weight: what the loss of a micro-batch counts in the batch's mean, as a function of it; ``"sum"``: losses
            are added as they are; ``None``: its number of samples, or of labels that are not -100, as losses show.
        split_batch: ``split_batch(batch, m)`` returns m micro-batches; ``None``: along dimension 0.
        passes: how often a training step runs the layers, each pass from the first to the last.
        rank_order: whose ranks have neighbouring numbers: ``"pipeline"`` or ``"replicas"``.
        timeout: the longest that one process waits for another.
        device: where this rank computes; ``None``: where the model is, else with NCCL the GPU of number LOCAL_RANK.
        compare_losses: whether the losses of some micro-batches, alone and together, are compared in the first batches.

    Raises:
        ConfigurationError: an option, the processes or the model do not fit.
        PartitionError: the layers are not clear, or too few.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> pipeline = Pipeline(model, schedule="gpipe", micro_batches=3, stages=2)
        >>> loss = pipeline.train(lambda x: model(x).square().mean(), torch.ones(6, 4))
        >>> model[0].weight.grad is not None
        True
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: str | PathLike[str] | Family | Schedule = "1f1b",
        micro_batches: int | Auto = "auto",
        pipeline_parallel_size: int | Auto = "auto",
        data_parallel_size: int | Auto = "auto",
        stages: int | Auto = "auto",
        layers: str | Sequence[str] | None = None,
        balance: Balance = "auto",
        recompute: Recompute = "never",
        deferred_batch_norm: bool = True,
        loss_weight: LossWeight | None = None,
        split_batch: SplitBatch | None = None,
        passes: int = 1,
        rank_order: RankOrder = "pipeline",
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device | str | None = None,
        compare_losses: bool = True,
    ) -> None:
        check_options(micro_batches, layers, balance, loss_weight, split_batch, passes, timeout)
        family = schedules.get(schedule)
        if isinstance(micro_batches, int):
            family = family.for_batches_of(micro_batches)
        world_size = _world_size()
        layout = arrange(family, world_size, pipeline_parallel_size, data_parallel_size, stages)
        _check(model, world_size)
        found = find_layers(model, layers, layout.stages)
        counts = divide(model, found, layout.stages, balance)
        hosts = -(-world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        place = _device_of(model) if device is None else torch.device(device)
        transport = open_transport(topology_of(layout, family, rank_order, hosts), place, timeout)
        vars(rank_zero_only).setdefault("rank", transport.process)  # whose warnings are shown
        self._seed = transport.broadcast_object(torch.initial_seed(), 0, tuple(range(world_size)))
        initialise_meta(model, self._seed)
        check_all_set(model)
        engine = self._engine = Engine(
            *(model, found, counts, family, transport),
            recompute=recompute,
            deferred_batch_norm=deferred_batch_norm,
            passes=passes,
        )
        if not engine.synchronous:
            raise ConfigurationError(
                f"Schedule {family.name!r} leaves batches under way when the optimizer steps: after a call the "
                "gradients of its batch are not there.",
                hint='Use one with a flush, such as "1f1b", or Trainer(strategy=PipeStrategy(…)).',
            )
        _DIVIDED.update(model.modules())
        engine.partition()
        model.to(place)
        engine.synchronize()
        self._step = SharedStep(engine)
        self._splitter = BatchSplitter(engine, micro_batches, split_batch, loss_weight, compare_losses=compare_losses)
        self._calls, self._in_turns = 0, False
        self._barred: tuple[str, str] | None = None  # why nothing can be called, and what to do
        if world_size > 1:
            atexit.register(transport.close)  # groups and threads must not outlive the process

    def __repr__(self) -> str:
        balance, engine = self._engine.balance, self._engine
        return f"Pipeline({type(engine.module).__name__}, schedule={engine.family.name!r}, balance={balance})"

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._engine.transport.device

    @property
    def data_parallel_size(self) -> int:
        """Pipelines side by side: samples are dealt out to so many."""
        return self._engine.transport.topology.replicas

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's pipeline."""
        return self._engine.transport.replica

    # ------------------------------------------------------------------ batches

    def train(self, step: Step, batch: Any = None, *, scaler: torch.amp.GradScaler | None = None) -> Any:
        """Run forward and backward passes of one batch, and add its gradients to ``parameter.grad``.

        Call it again before the optimizer steps to accumulate gradients over batches. With several replicas the
        gradients are those of the mean over the samples of all. Collective over all processes.

        Args:
            step: ``step(micro_batch)`` returns the loss, or a dictionary with the key ``loss``. It runs for each
                micro-batch on each rank, and ends early where another rank goes on.
            batch: the same on all ranks of the pipeline; ``None`` where others have loaded it.
            scaler: a gradient scaler, whose factor the gradients get; then ``scaler.step(optimizer)``.

        Returns:
            What the step would have returned for the whole batch of this pipeline, detached, on all ranks.

        Raises:
            ConfigurationError: gradients are off, the step returns no loss, or ranks have different batches.
            CutError: the step needs, on one stage, a value that another one has.
        """
        if not torch.is_grad_enabled():
            raise ConfigurationError(
                "train() is called where gradients are off, as within torch.no_grad().", hint="Call it outside."
            )
        engine = self._engine
        with self._at_work("train()"):
            self._check_divided(pair for pair in engine.module.named_parameters() if pair[1].requires_grad)
            (batch,) = shared(None if batch is None else [batch], engine)
            if scaler is not None and "_unscale_grads_" not in vars(scaler):  # it decides for all ranks at once then
                vars(scaler)["_unscale_grads_"] = unscaling_together(scaler._unscale_grads_, engine)
            factor = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.device)))
            parts, seed = self._splitter.split(batch), mix(self._seed, self._calls)

            def trained(run: Callable[[int, Any], Any]) -> dict[int, Any]:
                nonlocal parts
                if (number := self._splitter.due(parts)) is not None:
                    parts = self._splitter.looked_at(parts, run, seed, number)
                weights = [factor * weight for weight in self._splitter.weights(parts)]
                return losses_on_host(engine.train(run, parts.parts, weights, seed=seed), engine)

            with withheld_gradients(list(engine.module.parameters())) as withheld:
                outputs = self._step.run(step, trained, len(parts.parts))
            self._check_divided((key, each) for key, each in engine.ownership.unknown.items() if each.grad is not None)
            output = of_batch(outputs, parts, withheld, self.device)
            loss = loss_of(output)
            loss.backward()  # type: ignore[no-untyped-call]
        return {**output, "loss": loss.detach()} if isinstance(output, Mapping) else loss.detach()

    def evaluate(self, step: Step, batches: Iterable[Any] | None = None) -> list[Any]:
        """Run forward passes alone, without gradients, several batches at a time. Collective over the pipeline.

        Batches are not cut. Call ``model.eval()`` before, as on one device. A step may call layers again, as
        ``model.generate`` does: then the ranks take turns.

        Args:
            step: ``step(batch)`` returns what is wanted of a batch.
            batches: the same on all ranks of the pipeline; ``None`` where others load them.

        Returns:
            What the step returned for each batch, on all ranks of the pipeline.
        """
        results: list[Any] = []
        batches = None if batches is None else iter(batches)
        size = 4 * self._engine.transport.topology.ranks
        with self._at_work("evaluate()"), torch.no_grad():
            while group := shared(None if batches is None else [*islice(batches, size)], self._engine):
                seed, turns = mix(self._seed, self._calls, len(results)), self._in_turns
                call = partial(self._engine.evaluate, parts=group, seed=seed)
                outputs = self._step.run(step, partial(call, turns=turns), len(group), may_repeat=not turns)
                if len(outputs) < len(group):
                    self._in_turns = True
                    outputs = self._step.run(step, partial(call, turns=True), len(group))
                results += [outputs[index] for index in range(len(group))]
        return results

    # ------------------------------------------------------------------ gradients and state

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Limit the norm of the gradients of the whole model, as ``torch.nn.utils.clip_grad_norm_`` does on one device.

        Collective over the pipeline.

        Args:
            max_norm: the largest norm that is left.
            norm_type: the order of the norm; may be infinity.

        Returns:
            The norm before, on all ranks.
        """
        with self._at_work("clip_grad_norm_()"):
            parameters = list(self._engine.module.parameters())
            norm = gradient_norm(self._engine, parameters, norm_type)
            clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model, in host memory, on all ranks. Collective over the pipeline."""
        with self._at_work("state_dict()"):
            return self._engine.whole_state()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of a whole model; each rank takes what it holds.

        Args:
            state: from `state_dict`, or from the ``state_dict`` of the model on one device.
            strict: whether different names are an error.
        """
        load_held(self._engine.module, self._engine.holds, state, strict=strict)

    # ------------------------------------------------------------------ parts of a call

    @contextmanager
    def _at_work(self, call: str) -> Iterator[None]:
        """Around what needs the other ranks: after an error nobody knows where these are."""
        if self._barred is not None:
            raise ConfigurationError(f"{call} is called {self._barred[0]}.", hint=self._barred[1])
        self._calls += 1
        self._barred = f"in a step of {call}", "Call it between batches: ranks do not run a step equally often."
        try:
            yield
            self._barred = None
        except BaseException as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            hint = "After an error start the processes anew, from the last checkpoint."
            ended = f"after an error ({reason}), which has ended this pipeline", hint
            self._barred = ended if self._engine.transport.topology.world_size > 1 else None  # one waits for nobody
            atexit.unregister(self._engine.transport.close)  # nor does anybody for the others, which may be missing
            raise

    def _check_divided(self, trained: Iterable[tuple[str | int, Tensor]]) -> None:
        """Raise where something is trained that the division does not know: each process has a gradient of its own."""
        for name, each in trained if self._engine.transport.topology.world_size > 1 else ():
            if self._engine.ownership.known_name(each) is None:
                what = repr(name) if isinstance(name, str) else f"a parameter {tuple(each.shape)}"
                raise ConfigurationError(
                    f"The step trains {what}, which was no part of {type(self._engine.module).__name__} when "
                    "Pipeline(…) divided it: processes would have different gradients of it, or none.",
                    hint="Put it into the model before, as in `model.head = head`, or use requires_grad_(False).",
                )


def _world_size() -> int:
    """The number of processes that have come up.

    Raises:
        ConfigurationError: there are several, and they are not connected.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if (asked := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigurationError(
            f"This is one of {asked} processes (WORLD_SIZE), and there is no process group to connect them.",
            hint="Call torch.distributed.init_process_group() before Pipeline(…); Fabric.launch() does so.",
        )
    return 1


def _check(model: nn.Module, world_size: int) -> None:
    """Refuse what cannot be divided.

    Raises:
        ConfigurationError: it is divided already, or its norms would wait for other stages.
        PartitionError: a parameter has no shape yet.
    """
    check_module(model)
    check_norms(model, world_size)
    if any(part in _DIVIDED for part in model.modules()) or any(map(is_absent, model.parameters())):
        raise ConfigurationError(
            f"{type(model).__name__} is divided over the ranks of a pipeline already.",
            hint="Go on with that Pipeline, or build the model anew and load its state_dict().",
        )


def _device_of(model: nn.Module) -> torch.device:
    """Where a model is; of one on the CPU that NCCL is to serve, the GPU of this process."""
    own = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    connected = dist.is_available() and dist.is_initialized() and torch.cuda.is_available()
    if own.type in ("cpu", "meta") and connected and "nccl" in dist.get_backend_config():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu") if own.type == "meta" else own
