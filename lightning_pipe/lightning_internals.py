"""Every private name of Lightning and torchmetrics that this package uses, with the reason: seen in Lightning 2.6.

Functions and classes are imported from here. Attributes of objects are used where they are needed, and listed here.
"""

from __future__ import annotations

from lightning_pipe.internals import check

VERSIONS = {"lightning": ">=2.6,<2.7", "torchmetrics": ">=1.4,<2"}

_ASKED = "asked as Lightning's own loop does: whether it is left, so that what is in flight is drained before"
_OWN = "replaced for the time of a run: there is no hook"
_ARGUMENTS = "the arguments that the loop will pass to a step, which runs ahead of it"
_AHEAD = f"fetches the batches of an evaluation, whose steps run ahead of the loop; {_OWN}"
_COPY = "a copy of the module that is made before its layers are divided is refused"

NAMES = {
    "lightning.fabric.utilities.distributed": {
        "_all_gather_ddp_if_available": "gathers over the replicas, as Lightning's strategies do",
        "_init_dist_connection": "connects the processes, as Lightning's strategies do",
        "_set_num_threads_if_needed": "as in the launcher's method that is overridden",
        "_sync_ddp_if_available": "reduces over the replicas, as Lightning's strategies do",
    },
    "lightning.fabric.utilities.optimizer": {"_optimizers_to_device": "as Lightning's strategies do in setup"},
    "lightning.pytorch.overrides.distributed": {
        "_IndexBatchSamplerWrapper": "keeps the indices of batches while predicting, for ranks that do not load too"
    },
    "lightning.pytorch.strategies.launchers.subprocess_script": {
        "_SubprocessScriptLauncher": "starts the processes of a node; ours also ends them"
    },
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher": {
        "_call_children_scripts": "overridden: what comes before and after it",
    },
    "lightning.pytorch.strategies.parallel.ParallelStrategy": {
        "_configure_launcher": "overridden: Lightning's strategies choose their launcher in it",
        "_launcher": "set in it",
        "_layer_sync": "tells Trainer(sync_batchnorm=True)",
    },
    "lightning.pytorch.core.module.LightningModule": {
        "_current_fx_name": "which hook runs: decides what self.log may do",
        "_trainer": "the Trainer, without the error if there is none",
        "_metric_attributes": "set by self.log: no attribute that the user's step has changed",
        "_device_mesh": "set as ModelParallelStrategy does, for modules that divide themselves",
    },
    "lightning.pytorch.trainer.trainer.Trainer": {
        "_checkpoint_connector": "see dump_checkpoint, around which what is in flight is drained",
        "_logger_connector": "logs the values of a batch that comes out of the pipeline later",
        "_signal_connector": "see its names",
    },
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": {
        "_sigterm_notifier_fn": f"its handler for SIGTERM broadcasts from within the handler; {_OWN}",
        "_slurm_sigusr_handler_fn": f"its handler for SLURM saves from within the handler; {_OWN}",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result": {
        "_ResultMetric": f"walks all that it keeps whenever a value is logged, to bring it to the device; {_OWN}"
    },
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": {
        "_is_sequential": _ARGUMENTS,
        "_build_kwargs": _ARGUMENTS,
        "_build_step_args_from_hook_kwargs": _ARGUMENTS,
        "_combined_loader": "the loaders, for what they have in common with those of other replicas",
        "_data_fetcher": _AHEAD,
    },
    "lightning.pytorch.loops.prediction_loop._PredictionLoop": {
        "_build_kwargs": _ARGUMENTS,
        "_build_step_args_from_hook_kwargs": _ARGUMENTS,
        "_combined_loader": "the loaders, for what they have in common with those of other replicas",
        "_data_fetcher": _AHEAD,
    },
    "lightning.pytorch.loops.fit_loop._FitLoop": {
        "_can_stop_early": _ASKED,
        "_skip_backward": "set by a callback that renews batch norm's statistics (SWA)",
    },
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "_is_training_done": _ASKED,
        "_should_check_val_fx": _ASKED,
        "_batches_that_stepped": "the number under which loggers get a batch's values",
        "_broadcast_sigterm_tensor": f"asks before every batch whether to end; {_OWN}",
        "_results": "the values of the last call must not be logged again",
    },
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization": {
        "_optimizer_step": f"an optimizer step uses what was set for the batch that steps; {_OWN}",
    },
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint": {
        "_monitor_candidates": f"names a file after the state in it: drained before; {_OWN}",
        "_should_skip_saving_checkpoint": _ASKED,
    },
    "lightning.pytorch.callbacks.weight_averaging.WeightAveraging": {"_average_model": _COPY},
    "lightning.pytorch.callbacks.stochastic_weight_avg.StochasticWeightAveraging": {"_average_model": _COPY},
    "lightning.pytorch.plugins.precision.Precision": {"_after_closure": f"gradients have been clipped; {_OWN}"},
    "lightning.pytorch.profilers.pytorch.PyTorchProfiler": {
        "_register": "names parts of layers by hooks, which would end on one rank what begins on another: taken off"
    },
    "torchmetrics.Metric": {
        "_computed": "the result that compute keeps: forgotten where the state is exchanged",
        "_defaults": "the names of a metric's states",
        "_forward_cache": "the value of a batch, which self.log logs on steps",
        "_reductions": "how states of several processes become one",
        "_update_count": "part of the state: compute warns if it is 0",
    },
}
"""The names, by owner, each with what it is used for."""

check(VERSIONS, NAMES)

# ruff: noqa: E402  what is missing is named above, all of it
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather_over
from lightning.fabric.utilities.distributed import _init_dist_connection as connect_processes
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_threads
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as SubprocessLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
