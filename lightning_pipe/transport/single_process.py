"""The transport of one process that holds all stages: there is nobody to send to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import DONE, Lane, Reduction, Transport, Work
from lightning_pipe.transport.topology import Topology


class SingleProcess(Transport):
    """Collectives of one process, which are done at once. Stages of one rank hand over without messages.

    Args:
        device: where the stages compute; the CPU by default.
        timeout: the longest that an action may take, where a failure board watches.
    """

    def __init__(self, device: torch.device | None = None, timeout: timedelta = timedelta(seconds=30)) -> None:
        super().__init__(Topology(ranks=1), 0, torch.device("cpu") if device is None else device, timeout)

    @override
    def send(self, data: Tensor, peer: int, lane: Lane) -> NoReturn:
        self._nobody()

    @override
    def receive(self, data: Tensor, peer: int, lane: Lane) -> NoReturn:
        self._nobody()

    @override
    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        pass

    @override
    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        return DONE

    @override
    def reduce_scatter(self, parts: Sequence[Tensor], members: tuple[int, ...]) -> Work:
        return DONE

    @override
    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        return DONE

    @override
    def barrier(self, members: tuple[int, ...] | None = None) -> None:
        pass

    @override
    def close(self) -> None:
        pass

    @override
    def _send_bytes(self, data: Tensor, process: int, tag: int) -> NoReturn:
        self._nobody()

    @override
    def _receive_bytes(self, data: Tensor, process: int, tag: int) -> NoReturn:
        self._nobody()

    def _nobody(self) -> NoReturn:
        raise CommunicationError("internal error: a message has no receiver: one process holds all stages.")
