"""What Gloo does in a torch that was built with CUDA: collectives of device tensors go through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fake_cuda import device


class _Staged:
    """A collective of the host, whose results are copied to the device when it is waited for."""

    def __init__(self, work: dist.Work, results: list[tuple[Tensor, Tensor]]) -> None:
        self._work, self._results = work, results

    def wait(self, *timeout: Any) -> bool:
        done = self._work.wait(*timeout)
        with torch.no_grad():
            for target, host in self._results:
                target.copy_(host, non_blocking=True)
        self._results = []
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def install() -> None:
    """Let collectives over Gloo take tensors of the device."""
    for name in ("all_reduce", "broadcast", "reduce"):
        _replace(name, _in_place(getattr(dist, name)))
    _replace("all_gather", _gather(dist.all_gather))


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def _is_staged(tensor: Tensor, group: Any) -> bool:
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


def _in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *arguments: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        if not _is_staged(tensor, group):
            return original(tensor, *arguments, group=group, async_op=async_op, **options)
        host = _on_host(tensor)
        return _ended(original(host, *arguments, group=group, async_op=True, **options), [(tensor, host)], async_op)

    return call


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(results: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not _is_staged(tensor, group):
            return original(results, tensor, group=group, async_op=async_op)
        hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in results]
        work = original(hosts, _on_host(tensor), group=group, async_op=True)
        return _ended(work, list(zip(results, hosts, strict=True)), async_op)

    return call


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    with torch.no_grad():
        host.copy_(tensor, non_blocking=True)
    device.native.finish()  # it is a thread of Gloo that waits for the copy, not the host
    return host


def _ended(work: dist.Work | None, results: list[tuple[Tensor, Tensor]], async_op: bool) -> Any:
    if work is None:  # this process is no member
        return None
    staged = _Staged(work, results)
    return staged if async_op else staged.wait() and None
