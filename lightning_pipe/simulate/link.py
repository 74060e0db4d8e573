"""What a message costs by its size."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from lightning_pipe.schedules.dependencies import Number


@dataclass(frozen=True)
class Link:
    """A way between two ranks on which a message of L bytes takes ``alpha + beta * L``.

    Args:
        alpha: seconds that a message takes however small it is.
        beta: seconds per byte: 1 / bandwidth.

    Example:
        >>> Link(alpha=1e-3, beta=1e-9).message(2_000_000)
        0.003
    """

    alpha: Number = 0
    beta: Number = 0

    def message(self, size: Number) -> Number:
        """Seconds of one message.

        Args:
            size: bytes.
        """
        return self.alpha + self.beta * size

    def all_reduce(self, size: Number, members: int) -> Number:
        """Seconds of an all-reduce after Rabenseifner: ``2 log2(r) alpha + 2 (r - 1) / r * beta * L``.

        Chimera (Li and Hoefler, SC'21), section 3.4.

        Args:
            size: bytes that every member has, L.
            members: that sum, r. Alone there is nothing to do.
        """
        if members < 2:
            return 0
        return 2 * log2(members) * self.alpha + 2 * (members - 1) / members * self.beta * size

    def all_shares(self, size: Number, members: int) -> Number:
        """Seconds of half an all-reduce, share by share: ``r log2(r) alpha + (r - 1) / r * beta * L``.

        Half of it is the sum of every share for its owner, or the copy of every share from its owner to all. Both are r
        operations of a share each (a reduce for every owner, a broadcast from every owner), each with the latency of a
        half, where `all_reduce` has that latency once.

        Args:
            size: bytes of all shares together, L.
            members: that have a share each, r. Alone there is nothing to do.
        """
        if members < 2:
            return 0
        return members * log2(members) * self.alpha + (members - 1) / members * self.beta * size
