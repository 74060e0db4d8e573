"""Looks after backward passes inside a step: of a derivative over a cut they would find a part.

Only what a stage makes itself has its whole graph there. What came over the cut ends at it, and a derivative by
something older may go on behind it: by an input that is a residual of every layer, by a tied weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.autograd_graph import edge_of, nodes_behind
from lightning_pipe.intercept.incoming import Entry
from lightning_pipe.intercept.stage_run import StageRun
from lightning_pipe.intercept.torch_patches.patch import current_run
from lightning_pipe.intercept.turns.run import TurnRun
from lightning_pipe.torch_internals import run_backward


def _run_backward(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    run = current_run()
    if isinstance(run, TurnRun) and not run.surroundings.inside:
        raise CutError(
            "a backward pass runs in an evaluation step that calls the layers several times, on several ranks.",
            hint="Take derivatives inside one layer, or use one device.",
        )
    if isinstance(run, StageRun) and run.incoming is not None and any(run.incoming.requires_grad):
        inputs = args[3]
        # ``backward()`` has no inputs: it goes wherever the graph leads.
        targets = [edge_of(each) for each in inputs if run.is_older(each)] if inputs else [(None, 0)]
        if any(isinstance(node, Entry) for target in targets for node in nodes_behind(outputs, target)):
            raise CutError(
                "a backward pass inside the step (torch.autograd.grad, for instance) goes back over the cut before "
                "this stage: it would find a part of the derivative alone.",
                hint="Take the derivative by a tensor that is made on the stage that uses it, inside one layer for "
                "instance (x = x.detach().requires_grad_()), or use one stage.",
            )
    return run_backward(outputs, *args, **kwargs)


INNER_BACKWARD = ((torch.autograd, "_engine_run_backward", _run_backward),)
"""While it is installed, backward passes of the user's code look whether a cut is in their way."""
