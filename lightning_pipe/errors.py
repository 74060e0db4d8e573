"""The errors this package raises on purpose: each says the requirement, the numbers and the remedy."""

from __future__ import annotations


class PipeError(RuntimeError):
    """Base of every error raised on purpose by lightning-pipe.

    Args:
        message: what was required and what was found, with the numbers.
        hint: what to do about it; printed on a line of its own.

    Example:
        >>> print(PipeError("5 layers cannot fill 8 stages.", hint="Use stages=5 or fewer."))
        5 layers cannot fill 8 stages.
        Hint: Use stages=5 or fewer.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nHint: {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[PipeError], tuple[str, str | None], dict[str, object]]:
        return type(self), (self.message, self.hint), vars(self)


class ScheduleError(PipeError):
    """A schedule is unknown, incomplete, impossible or would deadlock."""


class PartitionError(PipeError):
    """The layer sequence cannot be found, or cannot be divided over the stages as asked."""


class CutError(PipeError):
    """The user's code needs, on this stage, a value that only another stage has."""


class RepeatedRunError(CutError):
    """A run of the step that must leave nothing behind has taken what does not come again."""


class ConfigurationError(PipeError):
    """The Trainer, the strategy and the machine do not fit together."""


class CommunicationError(PipeError):
    """A peer failed, left, or did not answer in time."""


class CollectiveError(PipeError):
    """What all processes must do together was done by some of them."""


class CheckpointError(PipeError):
    """A checkpoint cannot be written, or is not one."""


class VersionError(PipeError, ImportError):
    """What is installed lacks something that this package needs."""
