"""Random delays on streams, and memory that is taken again at once: a missing wait shows as wrong numbers.

Kernels of a few microseconds hide what does not wait for them. So layers and messages start behind a random delay on
their stream, and after every layer memory is allocated and filled: a buffer that was freed too early gets other values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_pipe.transport.base import Transport
from tests.benchmarks.measure import Finding
from tests.gpu.rows import PLACE, compared, on_device
from tests.gpu.setting import Setting
from tests.support import equality_sweep, oracle
from tests.support.equality_sweep import Point
from tests.support.model_zoo import ZOO

_CYCLES = 2_000_000
"""The longest delay on a device, about a millisecond."""
_BLOCK = 1 << 16


OVER_PROCESSES = (
    ("residual", Point("1f1b", 2, 4, steps=5)),
    ("tied_to_layers", Point("zero_bubble", 2, 3, steps=5)),
)


@dataclass(frozen=True)
class Disturbance:
    """Delays and allocations of one seed."""

    seed: int

    def __str__(self) -> str:
        return f"delays of seed {self.seed}"


def run(setting: Setting) -> Iterator[Finding]:
    """Some models on one device, then over two processes that share it."""
    from tests.gpu.over_processes import equal

    names = ("residual",) if setting.small else ("residual", "skips", "tied_to_layers", "in_place")
    for name in names:
        for seed in range(1 if setting.small else 3):
            what = f"{name}, one rank, delays of seed {seed}"
            yield compared(what, partial(_on_one_rank, name, Disturbance(seed)))
    if setting.small:
        return
    for seed in range(3):
        yield from equal(OVER_PROCESSES, "gloo", Disturbance(seed))
        if setting.devices > 1:
            yield from equal(OVER_PROCESSES, "nccl", Disturbance(seed))


def _on_one_rank(name: str, disturbance: Disturbance) -> list[str]:
    entry, point = on_device(ZOO[name], PLACE), Point("1f1b", 4, 3, ranks=1)
    found = equality_sweep.pipelined(
        entry, point, PLACE, around=lambda module, transport: disturbed(module, transport, disturbance)
    )
    return oracle.differences(found, equality_sweep.expected(entry, point))


@contextmanager
def disturbed(module: nn.Module, transport: Transport, disturbance: Disturbance | None) -> Iterator[None]:
    """Put delays and allocations into the layers of a module and the messages of a transport."""
    if disturbance is None:
        yield
        return
    disturb = _Disturb(disturbance.seed + 100 * transport.process, transport.device)
    hooks = []
    for part in module.modules():
        if not list(part.children()):
            hooks.append(part.register_forward_pre_hook(disturb.before))
            hooks.append(part.register_forward_hook(disturb.after))
    send, receive = transport.send, transport.receive

    def late_send(data: Tensor, *where: Any) -> Any:
        disturb.delay()
        return send(data, *where)

    def late_receive(data: Tensor, *where: Any) -> Any:
        disturb.delay()
        return receive(data, *where)

    try:
        with mock.patch.object(transport, "send", late_send), mock.patch.object(transport, "receive", late_receive):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Disturb:
    """Draws delays and block sizes."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._draw, self._device = random.Random(seed), device

    def delay(self) -> None:
        """Hold up the current stream."""
        torch.cuda._sleep(self._draw.randrange(1, _CYCLES))

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Delay the layer."""
        self.delay()

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Take memory that was freed meanwhile, and fill it."""
        for _ in range(3):
            block = torch.empty(self._draw.randrange(1, _BLOCK), dtype=torch.uint8, device=self._device)
            block.fill_(255)  # not a number, in every floating-point type
