"""Pipeline parallelism for PyTorch Lightning: ``Trainer(strategy="pipe")``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_pipe import distributions, schedules
from lightning_pipe.trainer import registry
from lightning_pipe.version import __version__

if TYPE_CHECKING:
    from lightning_pipe import partition, simulate, skip
    from lightning_pipe.callbacks import PipelineTimeline
    from lightning_pipe.construction import deferred_init
    from lightning_pipe.engine.batch_kinds import register_batch
    from lightning_pipe.intercept.recompute import is_recomputing
    from lightning_pipe.parameters.deferred_batchnorm import DeferredBatchNorm
    from lightning_pipe.parameters.loading import load_weights
    from lightning_pipe.plain.pipeline import Pipeline
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.planning.make import plan
    from lightning_pipe.planning.search import search
    from lightning_pipe.profiling.make import profile
    from lightning_pipe.simulate import Costs
    from lightning_pipe.trainer.strategy import PipeStrategy

__all__ = [
    "CostProfile",
    "Costs",
    "DeferredBatchNorm",
    "PipeStrategy",
    "Pipeline",
    "PipelineTimeline",
    "__version__",
    "deferred_init",
    "is_recomputing",
    "load_weights",
    "partition",
    "plan",
    "profile",
    "register_batch",
    "schedules",
    "search",
    "simulate",
    "skip",
]

_MODULES = ("partition", "simulate", "skip")
_HOMES = {
    "CostProfile": "lightning_pipe.planning.cost_profile",
    "Costs": "lightning_pipe.simulate",
    "DeferredBatchNorm": "lightning_pipe.parameters.deferred_batchnorm",
    "deferred_init": "lightning_pipe.construction",
    "is_recomputing": "lightning_pipe.intercept.recompute",
    "load_weights": "lightning_pipe.parameters.loading",
    "Pipeline": "lightning_pipe.plain.pipeline",
    "plan": "lightning_pipe.planning.make",
    "profile": "lightning_pipe.profiling.make",
    "register_batch": "lightning_pipe.engine.batch_kinds",
    "search": "lightning_pipe.planning.search",
}

# there is one for each distribution of Lightning
_OF_LIGHTNING = {"PipeStrategy": "lightning_pipe.trainer.strategy", "PipelineTimeline": "lightning_pipe.callbacks"}

distributions.install()
registry.install()


def __getattr__(name: str) -> Any:
    """Import what is asked for, no sooner: schedules and simulations need neither torch nor lightning."""
    if name in _MODULES:
        return importlib.import_module(f"lightning_pipe.{name}")
    if name in _OF_LIGHTNING:
        return getattr(importlib.import_module(distributions.home(_OF_LIGHTNING[name])), name)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lightning_pipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
