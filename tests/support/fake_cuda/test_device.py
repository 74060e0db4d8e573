"""The fake device itself: what it does as CUDA does, and what it tells. None of it is a GPU's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fake_cuda.call import RehearsalError, rehearse

pytestmark = pytest.mark.rehearsed


class Spy(torch.autograd.Function):
    threads: list[int]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Spy.threads = [threading.get_ident()]
        return gradients[0]


def looked_at() -> dict[str, Any]:
    """What a process sees of the device."""
    from tests.support.fake_cuda import device

    found: dict[str, Any] = {"type": type(torch.zeros(1, device="cuda")) is Tensor}
    found["devices"] = torch.cuda.device_count(), str(torch.zeros(1, device="cuda").device), torch.cuda.is_available()
    found["name"] = torch.cuda.get_device_name()
    found["new memory"] = bool(torch.empty(9, device="cuda").isnan().all())
    errors = {}
    for what, other in {"host": torch.ones(2), "other": torch.ones(2, device="cuda:1")}.items():
        with pytest.raises(RuntimeError) as error:
            torch.ones(2, device="cuda") + other
        errors[what] = str(error.value)
    found["mixed"] = errors
    x = torch.randn(4, 3, device="cuda", requires_grad=True)
    Spy.apply(x).square().sum().backward()
    found["another thread"] = Spy.threads != [threading.get_ident()]
    found["gradient"] = bool((x.grad == 2 * x).all())
    torch.manual_seed(3)
    drawn = torch.randn(4, device="cuda")
    torch.manual_seed(3)
    found["drawn again"] = bool((torch.randn(4, device="cuda") == drawn).all())
    host = torch.zeros(4, pin_memory=True)
    host.copy_(drawn, non_blocking=True)
    found["late"] = bool(host.isnan().all())
    torch.cuda.synchronize()
    found["arrived"] = bool((host == drawn.cpu()).all())
    device.SEEN.waits.clear()
    net = nn.Linear(3, 3).cuda()
    device.SEEN.waits.clear()
    total = net(x).sum()
    found["no wait"] = sum(device.SEEN.waits.values())
    total.item()
    found["waits"] = [(wait.why, wait.place, count) for wait, count in device.SEEN.waits.items()]
    before = torch.cuda.memory_allocated()
    block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    found["taken"] = torch.cuda.memory_allocated() - before
    del block
    found["given back"] = torch.cuda.memory_allocated() - before
    return found


def test_it_does_what_cuda_does() -> None:
    found = rehearse(looked_at)
    assert found.pop("devices") == (2, "cuda:0", True)
    assert "no GPU" in found.pop("name")
    mixed = found.pop("mixed")
    assert all("Expected all tensors to be on the same device" in text for text in mixed.values())
    assert "cuda:0 and cpu" in mixed["host"]
    assert "cuda:0 and cuda:1" in mixed["other"]
    assert found.pop("no wait") == 0
    ((why, place, count),) = found.pop("waits")
    assert (why, count) == ("read a value", 1)
    assert "looked_at" in place
    assert found.pop("taken") == 1 << 20
    assert found.pop("given back") == 0
    assert all(value is True for value in found.values()), found


def too_early() -> None:
    """The host changes what the device may still read."""
    host = torch.ones(4).pin_memory()
    host.to("cuda", non_blocking=True)
    host.zero_()
    torch.cuda.synchronize()


def test_pinned_memory_that_changes_too_early_is_a_hazard() -> None:
    with pytest.raises(RehearsalError, match="pinned memory was changed while the device could still read it"):
        rehearse(too_early)


def host_reads() -> int:
    import ctypes

    tensor = torch.ones(4, device="cuda")
    return ctypes.string_at(tensor.data_ptr(), 1)[0]


@pytest.mark.slow  # as all rehearsals in protected memory, which need a process of their own
def test_the_host_cannot_read_protected_memory() -> None:
    assert rehearse(host_reads) in range(256)
    with pytest.raises(RehearsalError, match="ended with code -11"):
        rehearse(host_reads, protects=True)
