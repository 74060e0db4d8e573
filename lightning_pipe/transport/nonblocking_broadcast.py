"""Messages from one process to the others of its pipeline for which it does not wait.

A collective broadcast over Gloo ends at its source when all others have come to it. In a schedule without a flush the
rank with the loss is calls ahead of the first stage, and would wait for it in every batch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.transport import object_broadcast
from lightning_pipe.transport.base import DONE, Transport, Work

# Above the tags of all micro-batches.
_TAG = (1 << 29) - 2


class NonBlockingBroadcast:
    """Broadcasts to the processes of this pipeline; has what `wire.broadcast` needs of a transport.

    Args:
        transport: this process's transport.
        ahead: turns that the source may be ahead of its receivers.
    """

    def __init__(self, transport: Transport, ahead: int) -> None:
        self._transport = transport
        self._ahead = ahead
        self._sent: deque[list[Work]] = deque([[]])

    @property
    def process(self) -> int:
        """This process."""
        return self._transport.process

    @property
    def device(self) -> torch.device:
        """Where tensors of an accelerator arrive."""
        return self._transport.device

    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        """Copy the source's tensor to the other members; they wait for it."""
        locate = self._transport.topology.locate
        if self.process == source:
            data = tensor.cpu().numpy()
            peers = [locate(member)[1] for member in members if member != source]
            self._sent[-1] += [self._transport.send_object(data, peer, _TAG) for peer in peers]
        else:
            tensor.copy_(torch.from_numpy(self._transport.receive_object(locate(source)[1], _TAG)))
        return DONE

    def share(self, obj: Any, source: int, members: tuple[int, ...]) -> Any:
        """The object of one process, on all members."""
        return object_broadcast.broadcast(self, obj, source, members)

    def turn(self) -> None:
        """One more turn of the source: what lies too far back must have arrived."""
        self._sent.append([])
        while len(self._sent) > self._ahead + 1:
            for work in self._sent.popleft():
                work.wait()

    def flush(self) -> None:
        """Wait until everything has arrived."""
        while self._sent:
            for work in self._sent.popleft():
                work.wait()
        self._sent.append([])
