"""Lets forward hooks on parts of layers act on all stages.

A hook may keep what it sees for code behind the layers: Hugging Face's models collect router logits and attentions so.
It acts where its layer runs. There what it is given is described in a call of its own, in front of that of the layer;
stages that skip the layer let the hook act on placeholders. Both follow what the hook does as code outside layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_pipe.intercept.call_record import CallRecord, Unseen
from lightning_pipe.intercept.describe import described
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.torch_internals import tree_map

Parts = Sequence[tuple[str, nn.Module]]


@contextmanager
def shown(tracker: Tracker, name: str, parts: Parts, arguments: Sequence[Any]) -> Iterator[None]:
    """While a layer runs: describe what its hooks are given, and follow them.

    Args:
        tracker: that of the run.
        name: the layer or outside module.
        parts: its parts with hooks.
        arguments: the leaves of what it is given.
    """
    before = [(part, part._forward_hooks) for _, part in parts]
    for path, part in parts:
        hooks = enumerate(part._forward_hooks.items())
        # A new dictionary: the handles of the hooks refer to the old one, from which a hook may remove itself. The keys
        # stay: by them torch knows which hooks take keyword arguments and which are always called (torch 2.13).
        # Past __setattr__: that of what torch.compile makes of a module would set it in the module.
        vars(part)["_forward_hooks"] = OrderedDict(
            (key, partial(_show, tracker, name, (path, number), arguments, hook)) for number, (key, hook) in hooks
        )
    try:
        yield
    finally:
        for part, hooks_before in before:
            vars(part)["_forward_hooks"] = hooks_before


def _show(
    tracker: Tracker,
    name: str,
    place: tuple[str, int],
    arguments: Sequence[Any],
    hook: Callable[..., Any],
    part: nn.Module,
    *given: Any,
) -> Any:
    """What stands for a hook: describes in a call what this is given, and lets it act."""

    def seen(leaf: Any) -> Any:
        own = isinstance(leaf, nn.Parameter) and all(leaf is not argument for argument in arguments)
        return Unseen(type(leaf).__qualname__) if own else leaf

    structure, leaves, new = described(tree_map(seen, given), arguments)
    call = f"{name}.{place[0]}"
    tracker.calls.append(CallRecord(call, *tracker.numbers.give_all(new), structure, leaves, hook=place))
    tracker.digest.call(call, ())
    with tracker.acting():
        return hook(part, *given)
