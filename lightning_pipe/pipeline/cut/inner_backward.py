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
from lightning_pipe.pipeline.cut.patch import Patch
from lightning_pipe.pipeline.cut.received import Entry

# Behind ``torch.autograd.grad`` and every ``backward`` (torch 2.13).
_original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

_Edge = tuple[Any, int]
_NONE: _Edge = (None, 0)


def _run_backward(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    run = INNER_BACKWARD.run
    if run is not None and run.inbox is not None and any(run.inbox.requires_grad):
        inputs = args[3]
        # ``backward()`` has no inputs: it goes wherever the graph leads.
        targets = [_edge(each) for each in inputs if run.is_older(each)] if inputs else [_NONE]
        if any(_crosses(outputs, target) for target in targets):
            raise CutError(
                "a backward pass inside the step (torch.autograd.grad, for instance) goes back over the cut before "
                "this stage: it would find a part of the derivative alone.",
                hint="Take the derivative by a tensor that is made on the stage that uses it, inside one layer for "
                "instance (x = x.detach().requires_grad_()), or use one stage.",
            )
    return _original(outputs, *args, **kwargs)


def _crosses(outputs: Sequence[Tensor | GradientEdge], target: _Edge) -> bool:
    """Whether the graph behind some results leads over the cut, other than by ``target`` itself."""
    seen: set[Any] = set()
    pending = [_edge(output) for output in outputs]
    while pending:
        node, number = pending.pop()
        if node is None or node in seen or (node, number) == target:
            continue
        if isinstance(node, Entry):
            return True
        seen.add(node)
        pending += node.next_functions
    return False


def _edge(tensor: Tensor | GradientEdge) -> _Edge:
    return tensor[:2] if isinstance(tensor, GradientEdge) else (tensor.grad_fn, tensor.output_nr)


INNER_BACKWARD = Patch((torch.autograd, "_engine_run_backward", _run_backward))
"""While it is installed, backward passes of the user's code look whether a cut is in their way."""
