"""The transport of one process that holds all stages: there is nobody to send to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology


class SingleProcess(Transport):
    """Collectives of one process are done at once, and stages of one rank hand over without messages.

    Args:
        device: where the stages compute; the CPU by default.
        timeout: the longest that an action may take, where a failure board watches.
    """

    def __init__(self, device: torch.device | None = None, timeout: timedelta = timedelta(seconds=30)) -> None:
        super().__init__(Topology(ranks=1), 0, torch.device("cpu") if device is None else device, timeout)

    def _nobody(self, *_: Any, **__: Any) -> NoReturn:
        raise CommunicationError("internal error: a message has no receiver: one process holds all stages.")

    send = receive = _start_send = _start_receive = _nobody
