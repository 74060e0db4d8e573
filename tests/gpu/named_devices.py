"""Code between layers that names devices: it does in a pipeline what it does on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from tests.benchmarks.measure import Finding
from tests.gpu.rows import PLACE, compared
from tests.gpu.setting import Setting

WIDTH, PARTS = 8, 2
Between = Callable[[Tensor], Tensor]


def _beside(other: Callable[[Tensor], Tensor]) -> Between:
    """Adds another tensor, which must say that it is on the same device."""

    def between(h: Tensor) -> Tensor:
        second = other(h)
        if h.device != second.device:
            raise ValueError(f"{second.device} is not {h.device}")
        return h + second.mean()

    return between


def _in_device(h: Tensor) -> Tensor:
    with h.device:
        return h + torch.ones(WIDTH)


def _autocast(h: Tensor) -> Tensor:
    with torch.autocast(h.device.type, torch.bfloat16):
        return h + (h @ torch.ones(WIDTH, WIDTH, device=h.device)).float()


def _side_stream(h: Tensor) -> Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = h * 2
    torch.cuda.current_stream().wait_stream(stream)
    h.record_stream(stream)
    result.record_stream(torch.cuda.current_stream())
    return result


def _drawn(h: Tensor) -> Tensor:
    return h + torch.randn(WIDTH, generator=torch.Generator(h.device).manual_seed(1), device=h.device)


BETWEEN: dict[str, Between] = {
    "zeros(device=h.device)": _beside(lambda h: torch.zeros(h.shape, device=h.device)),
    "h.new_ones": _beside(lambda h: h.new_ones(3)),
    "h.cpu().to(h.device)": _beside(lambda h: (h.cpu() * 2).to(h.device)),
    "h.cpu().to(h)": _beside(lambda h: (h.detach().cpu() * 2).to(h)),
    "h.to(tensor of the host)": lambda h: h + (h.to(torch.zeros(1)) * 2).to(h.device),
    "h.to(tensor of the host, float64)": lambda h: h + h.to(torch.zeros(1).double()).to(h),
    "h.type(h.type())": _beside(lambda h: h.type(torch.float64).type(h.type())),
    "h.type('torch.DoubleTensor')": lambda h: h + h.type("torch.DoubleTensor").to(h),
    "type_as": _beside(lambda h: torch.ones(3).type_as(h)),
    "h.is_cuda": lambda h: h * (2 if h.is_cuda else 1),
    "with h.device": _in_device,
    "autocast(h.device.type)": _autocast,
    "Generator(h.device)": _drawn,
    "tensor(device=h.device)": lambda h: h + torch.tensor([1.0], device=h.device),
    "to(device=, dtype=)": lambda h: h.to(dtype=torch.float64).to(device=h.device, dtype=torch.float32),
    "checkpoint": lambda h: checkpoint(torch.sin, h, use_reentrant=False),
    "h.to('cuda')": _beside(lambda h: h.to("cuda") * 2),
    "h.cuda()": _beside(lambda h: h.cuda() * 2),
    "h.cuda(0)": _beside(lambda h: h.cuda(0) * 2),
    "h.to(0)": _beside(lambda h: h.to(0) * 2),
    "ones_like(h, device='cuda')": _beside(lambda h: torch.ones_like(h, device="cuda")),
    "h.cpu().to('cuda')": _beside(lambda h: (h.cpu() * 2).to("cuda")),
    "h.cpu().cuda(non_blocking=True)": _beside(lambda h: (h.cpu() * 2).cuda(non_blocking=True)),
    "h.type('torch.cuda.FloatTensor')": _beside(lambda h: h.type("torch.cuda.FloatTensor") * 2),
    "h.cpu().type('torch.cuda.FloatTensor')": _beside(lambda h: h.cpu().type("torch.cuda.FloatTensor")),
    "get_device": lambda h: h + torch.ones(WIDTH, device=f"cuda:{h.get_device()}"),
    "device.index": lambda h: h * (1 + h.device.index),
    "a dictionary by device": lambda h: h + {torch.device("cuda", 0): 1.0}[h.to("cuda").device],
    "pinned memory": lambda h: h + torch.ones(WIDTH).pin_memory().to(h.device, non_blocking=True),
    "a side stream": _side_stream,
}


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each."""
    layers, batches = (2, 2) if setting.small else (4, 3)
    for name, between in BETWEEN.items():
        yield compared(name, partial(_differences, between, layers, batches), "1e-6 from one device")


class Net(nn.Module):
    """Layers with code between them."""

    def __init__(self, between: Between, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x.square().mean()


def _differences(between: Between, layers: int, batches: int) -> list[str]:
    torch.manual_seed(0)
    net = Net(between, layers).to(PLACE)
    plain = copy.deepcopy(net)
    parts = list(torch.randn(PARTS, 4, WIDTH).to(PLACE))
    for part in parts:
        (plain(part) / PARTS).backward()
    transport = SingleProcess(PLACE)
    pipeline = Pipeline(net, find_layers(net), [1] * layers, schedules.get("1f1b"), transport)
    pipeline.partition()
    for _ in range(batches):  # the first ones learn
        net.zero_grad()
        pipeline.train(lambda _, part: net(part), parts, [1 / PARTS] * PARTS)
    pipeline.restore()
    return [
        f"the gradient of {name} is off by {(own.grad - one.grad).abs().max().item():.1e}"
        for (name, own), one in zip(net.named_parameters(), plain.parameters(), strict=True)
        if not torch.allclose(own.grad, one.grad, atol=1e-6)
    ]
