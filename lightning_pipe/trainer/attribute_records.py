"""What is noted of the attributes that steps set in layers and in modules outside the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

UNKNOWN = object()
PLAIN = (int, float, str, bytes, type(None))
"""Types of values that no one changes in place."""

Key = tuple[str, str]
"""The names of a module and of an attribute."""


@dataclass(slots=True)
class Noted:
    """What the run under way has set.

    Args:
        former: what was there before.
        behind: whether it was set behind the stage of its module.
    """

    former: Any
    behind: bool = False


@dataclass(slots=True)
class Run:
    """A run of the step.

    Args:
        followed: whether earlier stages run other micro-batches before they learn what it sets.
        pipes: whether other micro-batches of its batch take another way, past other ranks.
        noted: what it has set.
        called: what calls have changed, in their order.
        read: what it has read before it has set it, of all that is watched.
    """

    followed: bool
    pipes: bool
    noted: dict[Key, Noted] = field(default_factory=dict)
    called: dict[Key, None] = field(default_factory=dict)
    read: set[Key] = field(default_factory=set)


@dataclass(slots=True)
class Complete:
    """What complete runs have made of an attribute since the other ranks were told.

    Args:
        former: what was there before them.
        value: what they have left.
        behind: whether they have set it behind the stage of its module.
        is_set: whether the step has set it, behind the calls that have changed it.
        is_kept: whether calls have changed it.
    """

    former: Any = None
    value: Any = None
    behind: bool = False
    is_set: bool = False
    is_kept: bool = False


@dataclass(slots=True)
class Known:
    """What is known of an attribute of a layer that complete runs have set.

    Args:
        set_behind: whether one on another rank has set it behind the stage of its module.
        agreed: where runs ahead of the others have set it: what complete runs have left there.
        last_change: which of all changes by other ranks was the last one of it.
    """

    set_behind: bool = False
    agreed: Any = UNKNOWN
    last_change: int = 0
