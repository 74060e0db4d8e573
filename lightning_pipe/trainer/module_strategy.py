"""What a strategy for pipelines answers Lightning about the divided module: what runs on it, how it is saved, left."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe.config import Sharding
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.whole_gradients import gradient_norm
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.lightning_internals import optimizers_to_device
from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
from lightning_pipe.parameters.ownership import named_tensors
from lightning_pipe.trainer.at_rest import CALL, check_gather_limit, gather, leave, resting, size_of
from lightning_pipe.trainer.checkpoints.divided import Checkpoints
from lightning_pipe.trainer.checks import check_outside_step
from lightning_pipe.trainer.construction import let_go_when_loaded
from lightning_pipe.trainer.process_strategy import ProcessStrategy
from lightning_pipe.trainer.run import PipelineRun


class ModuleStrategy(ProcessStrategy):
    """A strategy whose module is divided over the ranks: during a run, in checkpoints, and after a run.

    Args:
        process: the arguments of `ProcessStrategy`.
        save_folder: whether checkpoints are folders that all ranks write.
        shard_optimizer: what the holders of a parameter divide.
        gather_limit: bytes of the largest module that is whole again on every rank after a run.

    Attributes:
        run: the run that is under way; ``None`` between runs.
    """

    def __init__(self, *process: Any, save_folder: bool, shard_optimizer: Sharding, gather_limit: int) -> None:
        super().__init__(*process)
        self.run: PipelineRun | None = None
        self._save_folder, self._shard_optimizer = save_folder, shard_optimizer
        self._gather_limit = check_gather_limit(gather_limit)
        self._holders: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ facts

    @property
    def pipeline(self) -> Pipeline | None:
        """The module over the ranks, during a run, and after it while each rank keeps its share."""
        if self.run is not None:
            return self.run.pipeline
        return None if self.lightning_module is None else resting(self.lightning_module)

    @property
    def divided(self) -> PipelineRun:
        """The run, once the module is divided over the ranks."""
        if self.run is None:
            raise ConfigurationError(
                "The module is not divided over the ranks.", hint="Ask during fit, validate, test."
            )
        return self.run

    def whole_module(self) -> pl.LightningModule:
        """Give every rank the whole module after a run, in host memory. Collective: call it on all ranks.

        Modules up to ``gather_limit`` are whole already. The next run divides the module again.

        Returns:
            The module that the Trainer has run.

        Raises:
            ConfigurationError: a run is under way, or has ended with an error.
        """
        if self.lightning_module is None:
            raise ConfigurationError(f"{CALL}: the Trainer has had no module yet.", hint="Call it after fit.")
        if self.run is not None:
            raise ConfigurationError(
                f"{CALL} is called during a run, which needs the module divided.",
                hint="Call it after fit, on all ranks. A checkpoint has the whole module at any time.",
            )
        self.come(CALL)
        gather(self.lightning_module)
        return self.lightning_module

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all parameters, on all ranks. Collective: call it on all ranks.

        Each rank has the gradients of its own stages, so functions of torch and Lightning cannot tell.

        Args:
            norm_type: the order of the norm; may be infinity.

        Returns:
            A tensor with one number, on the device of this rank.

        Raises:
            ConfigurationError: a step runs, or no rank has gradients of one batch: with an asynchronous schedule, and
                with ``shard_optimizer=True`` once they are clipped.
        """
        self.come("trainer.strategy.grad_norm()")
        return gradient_norm(self.divided.pipeline, self._module().parameters(), norm_type)

    def come(self, call: str) -> None:
        """Wait until all processes are about to do what needs all of them.

        Args:
            call: what is called, as users write it.

        Raises:
            ConfigurationError: a step runs, or the run has ended with an error.
        """
        if self._interrupted():
            raise ConfigurationError(
                f"{call}: after an error the stages cannot be gathered any more.", hint="Load the last checkpoint."
            )
        check_outside_step(self.connected, call)
        self.meet(call)

    # ------------------------------------------------------------------ batches

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self.divided.loaders.loader(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self.divided.transfer():
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.divided.train(args, self.optimizers)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.divided.evaluate("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.divided.evaluate("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.divided.evaluate("predict_step", args)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        gradients = self.divided.gradients
        gradients.blocked = True
        try:
            yield
        finally:
            gradients.blocked = False

    # ------------------------------------------------------------------ checkpoints

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self._module(), self.pipeline, self.connected.transport, self._holders)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        whole = self.pipeline_parallel_size == 1 and not self._save_folder and not self._shard_optimizer
        if self._interrupted() and not whole:
            rank_zero_warn(f"{filepath} was not written: after an error the stages cannot be gathered any more.")
            return
        check_outside_step(self.connected, f"trainer.save_checkpoint({str(filepath)!r})")
        self.meet("trainer.save_checkpoint()")
        if self.run is not None:
            self.run.loaders.order.save(checkpoint)
        if self._save_folder:
            self._checkpoints().save_folder(checkpoint, filepath, self.optimizers)
        elif self._interrupted():  # all of it is here
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self._checkpoints().save_file(checkpoint, filepath, self.checkpoint_io, storage_options)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        sharded = None if self.run is None else self.run.gradients.sharded
        if sharded is None or self._interrupted():
            return super().optimizer_state(optimizer)
        return sharded.state_of(getattr(optimizer, "_optimizer", optimizer))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        return self._checkpoints().load(checkpoint_path, self.checkpoint_io, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints().load_module(let_go_when_loaded(checkpoint, self._module()), strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints().load_optimizers(checkpoint, self.optimizers)
        self.divided.loaders.order.load(checkpoint)
        optimizers_to_device(self.optimizers, self.root_device)

    # ------------------------------------------------------------------ end

    @override
    def teardown(self) -> None:
        run, self.run = self.run, None
        try:
            if run is not None:
                run.end()
                if not self._interrupted():
                    self._leave(run.pipeline)
                DeferredBatchNorm.revert(self._module())
        finally:
            super().teardown()

    def _leave(self, pipeline: Pipeline) -> None:
        module = self._module()
        self._holders = {name: pipeline.owners(name) for name, _ in named_tensors(module)}
        module.cpu()  # as `Strategy.teardown` will do; the whole module may not fit on this device
        small = size_of(module) <= self._gather_limit or self.pipeline_parallel_size == 1
        # what layers change in their buffers, other ranks do not see: one of them decides
        leave(module, pipeline, gather=self.connected.broadcast(small, 0))
