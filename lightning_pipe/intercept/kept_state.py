"""What layers and outside modules may keep of their calls: which modules and values count, and what says the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.snapshot import MISSING, is_compared
from lightning_pipe.intercept.tensor_state import same_values
from lightning_pipe.intercept.user_objects import inside
from lightning_pipe.torch_internals import DisableTorchFunction

Place = tuple[str, str]
"""The path from a module to a part of it, and the name of an attribute or buffer there."""
Key = tuple[nn.Module, str]
"""A module, and the name of an attribute or buffer of it."""


def now(part: nn.Module, attribute: str) -> Any:
    """What an attribute or buffer of a module is; `MISSING` if there is none."""
    return _holder(part, attribute).get(attribute, MISSING)


def put(part: nn.Module, attribute: str, value: Any) -> None:
    """Let an attribute or buffer of a module be this, past its ``__setattr__``; `MISSING` takes it away."""
    if value is MISSING:
        _holder(part, attribute).pop(attribute, None)
    else:
        _holder(part, attribute)[attribute] = value


def put_all(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """Let several attributes or buffers be these; returns what they were, to be put back."""
    before = {key: now(*key) for key in values}
    for key, value in values.items():
        put(*key, value)
    return before


def _holder(part: nn.Module, attribute: str) -> dict[str, Any]:
    return part._buffers if attribute in part._buffers else vars(part)


def written(*path: str) -> str:
    """An attribute as code writes it, by the names that lead to it; the LightningModule's own is empty."""
    return ".".join(filter(None, ("self", *path)))


def in_several_pipes(changed: str, who: str = "the step") -> CutError:
    """With several pipes, the step or a layer changes an attribute.

    Args:
        changed: the attribute as code writes it.
        who: changes it.
    """
    return CutError(
        f"{who} changes `{changed}`, and this schedule has several pipes: none of them runs all micro-batches, so none "
        "has the value that one device has.",
        hint="Change it in on_train_batch_start or on_train_batch_end, once for a batch; or use a schedule with one "
        "pipe, such as schedule='1f1b'. What is logged is joined.",
    )


def is_data(name: str) -> bool:
    """Whether an attribute of this name is neither a part of how a module is built nor one of its buffers."""
    return is_compared(name) and name not in ("forward", "_buffers")


def is_own(module: nn.Module) -> bool:
    """Whether a module is neither torch's, nor one of this package, nor a metric: it is known what they keep.

    Batch norms that defer their statistics keep some of every call, and cost a fifth more of a batch when looked into.
    """
    kind: Any = type(module)
    return str(kind.__module__).partition(".")[0] not in ("torch", "lightning_pipe") and not is_metric(kind)


@cache
def is_metric(kind: type[nn.Module]) -> bool:
    """Whether modules of a class are metrics of torchmetrics."""
    return any(str(base.__module__).partition(".")[0] == "torchmetrics" for base in kind.__mro__)


def alike(one: Any, other: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values say the same; the order of keys does not count. What has been ``seen`` may hold itself."""
    pair, seen = (id(one), id(other)), set() if seen is None else seen
    if one is other or type(one) is not type(other) or pair in seen:
        return type(one) is type(other)
    if isinstance(one, (Tensor, np.ndarray)):
        with DisableTorchFunction(), torch.no_grad():
            return same_values(*(each.cpu() if isinstance(each, Tensor) else each for each in (one, other)))
    held, others = inside(one), inside(other)
    if held is None or isinstance(held, set | frozenset):
        return bool(one == other or (one != one and other != other))
    seen.add(pair)
    if isinstance(held, Mapping):
        return held.keys() == others.keys() and all(alike(value, others[key], seen) for key, value in held.items())
    return len(held) == len(others) and all(alike(item, twin, seen) for item, twin in zip(held, others, strict=True))
