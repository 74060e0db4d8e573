"""Looks for kernels that touch memory in no order, in what the fake device and the stand-in for NCCL are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# private: torch's own detector (TORCH_CUDA_SANITIZER), which knows nothing of where its events come from (torch 2.13)
from torch.cuda._sanitizer import EventHandler

from tests.support.fake_cuda import device


class Order:
    """Feeds torch's detector of data races.

    Memory that is freed may be taken again at once by work on the stream that it was taken on. So a free counts as a
    write on that stream: kernels of other streams must have been waited for.

    Attributes:
        errors: what was found.
        launches: how many kernels were looked at.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.launches = 0
        self._handler: Any = EventHandler()
        self._lock = threading.RLock()

    def told(self, what: str, *values: Any) -> None:
        """What the extension or the stand-in for NCCL tells."""
        with self._lock:
            getattr(self, f"_{what.replace(' ', '_')}")(*values)

    def _launch(self, name: str, stream: int, read: Sequence[int], written: Sequence[int]) -> None:
        self.launches += 1
        places = {*read, *written} - {0}
        found = self._handler._handle_kernel_launch(
            stream, places - set(written), places & set(written), set(), name, {place: [] for place in places}
        )
        self.errors += [f"{each.current_access.operator} after {each.previous_access.operator}" for each in found]

    def _free(self, place: int, stream: int) -> None:
        self._launch("free", stream, [], [place])
        self._handler._handle_memory_deallocation(place)

    def _allocate(self, place: int) -> None:
        self._handler._handle_memory_allocation(place)

    def _record(self, event: int, stream: int) -> None:
        self._handler._handle_event_record(event, stream)

    def _block(self, event: int, stream: int) -> None:
        self._handler._handle_event_wait(event, stream)

    def _synchronize_stream(self, stream: int) -> None:
        self._handler._handle_stream_synchronization(stream)

    def _synchronize_event(self, event: int) -> None:
        self._handler._handle_event_synchronization(event)

    def _synchronize_device(self) -> None:
        self._handler._handle_device_synchronization()


@contextmanager
def watching() -> Iterator[Order]:
    """Watch the order of what this process gives to its devices."""
    order = Order()
    device.SEEN.listeners.append(order.told)
    device.native.trace(True)
    try:
        yield order
    finally:
        device.native.trace(False)
        device.SEEN.listeners.remove(order.told)
