"""What is noted of the attributes that steps set in layers and in modules outside the sequence, and what is refused.

`Runs` is what has to be known of the run that sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.shared_state import written

UNKNOWN = object()
PLAIN = (int, float, str, bytes, type(None))
"""Types of values that no one changes in place."""

Key = tuple[str, str]
"""The names of a module and of an attribute."""


class Runs(Protocol):
    """What knows the run of the step that is under way."""

    @property
    def in_module(self) -> bool:
        """Whether a layer or an outside module runs now: what that sets is its own."""

    def setting(self, part: nn.Module, name: str, value: Any) -> None:
        """One is about to set an attribute."""

    def note_set(self, part: nn.Module, name: str) -> None:
        """The step is about to set an attribute of one."""

    def adopts(self, part: nn.Module, name: str) -> None:
        """An attribute is about to become what runs on another rank have left, whatever those on this one have."""

    def is_behind(self, part: nn.Module, name: str | None = None) -> bool:
        """Whether the step is behind the stage that runs a module; with a name, if calls change the attribute there."""

    def changed_elsewhere(self, part: nn.Module, name: str) -> bool:
        """Calls on any rank have changed an attribute. Returns whether this rank does not know the value of now."""

    def hide(self, part: nn.Module, name: str) -> None:
        """Calls have changed an attribute of which this rank cannot have the value, unless it runs them all."""

    @property
    def one_pipe(self) -> bool:
        """Whether all micro-batches take the same way."""

    @property
    def several(self) -> bool:
        """Whether this rank may have several stages."""

    @property
    def apart(self) -> bool:
        """Whether what the run under way sets in the layers of others is put back behind it."""

    @property
    def watches(self) -> bool:
        """Whether reads of attributes can be seen."""

    def has_run(self, part: nn.Module, *, now: bool = False) -> bool:
        """Whether this rank has run a module; ``now``: in the run that ends."""


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


def is_same(one: Any, other: Any) -> bool:
    """Whether setting one value in the place of the other changes nothing."""
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))


def too_late(*key: str) -> CutError:
    """The step changes an attribute where earlier stages have gone on."""
    return CutError(
        f"the step changes `{written(*key)}` behind the layers of its stage, which has run other "
        "micro-batches by then: they would see an old value.",
        hint="Change it before the layers are called, in the module's forward, or in on_train_batch_end; or use "
        "micro_batches=1.",
    )


def too_late_elsewhere(*key: str) -> CutError:
    """The step sets a buffer by its own value behind the stage that alone has it."""
    return CutError(
        f"the step sets the buffer `{written(*key)}` by its own value behind the layers of its stage, which alone has "
        "that and does not run this code.",
        hint="Change it before the layers are called, inside a layer, or in on_train_batch_end.",
    )


def of_others(key: Key, own: Any, value: Any) -> CutError:
    """The step sets an attribute before the layers by what it has set for other micro-batches.

    Args:
        key: the attribute.
        own: the value where the layer runs.
        value: that of the complete run.
    """
    plain = isinstance(own, PLAIN) and isinstance(value, PLAIN)
    here, there = (f"to {own!r}", f"to {value!r}") if plain else ("to one value", "to another")
    return CutError(
        f"the step sets `{written(*key)}` {here} where the layer runs, and on the last stage {there}: it "
        "depends on what the step has set for other micro-batches.",
        hint="Compute it from the batch alone, or set it in a hook such as on_train_batch_start; with micro_batches=1 "
        "the step may set it by what it counts.",
    )
