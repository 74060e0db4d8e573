"""The Python half of the device: what ``torch.cuda`` answers, and what the host has waited for."""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.support.fake_cuda.build import loaded

NAME = "fake device (no GPU)"
_OWN = ("/fake_cuda/device.py", "/fake_cuda/gloo.py", "/fake_cuda/nccl.py")
_SKIPPED = (*_OWN, "/torch/", "/contextlib.py", "/functools.py", "/unittest/mock.py")


class Wait(NamedTuple):
    """A wait of the host for the device.

    Args:
        why: what it waited for.
        place: the line of this package that asked, or else of whoever did.
    """

    why: str
    place: str


class Seen:
    """What the extension has told so far."""

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        self.hazards: list[str] = []
        self.listeners: list[Callable[..., None]] = []

    def told(self, what: str, *values: Any) -> None:
        """Called by the extension."""
        if what == "wait":
            self.waits[Wait(values[0], _place())] += 1
        elif what == "hazard":
            self.hazards.append(f"{values[0]}, seen at {_place()}")
        else:
            for listener in self.listeners:
                listener(what, *values)


SEEN = Seen()
native: Any = None
"""The extension, once it is installed."""


def _place() -> str:
    """Where the package, or else somebody, has asked for what happens now."""
    frame: types.FrameType | None = sys._getframe(0)
    first = None
    while frame is not None:
        file = frame.f_code.co_filename
        if "/lightning_pipe/" in file:
            # without the number of the line, which changes with every edit
            return f"lightning_pipe/{file.rsplit('/lightning_pipe/')[-1]} {frame.f_code.co_name}"
        if first is None and not any(part in file for part in _SKIPPED):
            first = f"{file.rsplit('site-packages/')[-1].rsplit('/tests/')[-1]} {frame.f_code.co_name}"
        frame = frame.f_back
    return first or "?"


def install(devices: int, *, protects: bool = False) -> None:
    """Let this process have devices. Before anything asks for CUDA.

    Args:
        devices: how many.
        protects: whether code of the host that touches device memory ends the process.
    """
    global native
    native = loaded()
    native.set_up(devices, protects, SEEN.told)
    answers = _answers(devices)
    cuda = torch.cuda
    for module in (cuda, cuda.memory, cuda.random, cuda.streams, cuda.graphs):
        for name, value in answers.items():
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    for name, value in _private_answers(devices, answers).items():
        setattr(torch._C, name, value)
    torch.version.cuda = "12.8"
    _give_storages_memory()


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return native.current_device() if index is None else index


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> _Stream:
        if given:
            return super().__new__(cls, **given)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> _Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)


def _current_stream(device: Any = None) -> _Stream:
    current = torch._C._accelerator_getStream(_index(device))
    return _Stream(stream_id=current.stream_id, device_index=current.device_index, device_type=current.device_type)


def _exchange_device(index: int) -> int:
    before = native.current_device()
    if index >= 0:
        native.set_device(index)
    return before


def _memory_stats(*_: Any, **__: Any) -> OrderedDict[str, int]:
    allocated, peak = native.memory()
    return OrderedDict({"allocated_bytes.all.current": allocated, "allocated_bytes.all.peak": peak})


def _answers(devices: int) -> dict[str, Any]:
    """What replaces functions of ``torch.cuda``."""
    properties = types.SimpleNamespace(
        name=NAME, major=8, minor=0, total_memory=8 << 30, multi_processor_count=1, warp_size=32
    )
    return {
        "Event": _Event,
        "Stream": _Stream,
        "_exchange_device": _exchange_device,
        "_is_compiled": lambda: True,
        "_lazy_call": lambda function, **_: function(),
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda index: _exchange_device(index),  # Dynamo wants two functions
        "_set_stream_by_id": lambda **given: torch._C._accelerator_setStream(torch.Stream(**given)),
        "_sleep": native.sleep,  # the next wait of the host takes so much longer
        "current_device": native.current_device,
        "current_stream": _current_stream,
        "default_generators": tuple(native.default_generator(index) for index in range(devices)),
        "default_stream": lambda device=None: _Stream(stream_id=0, device_index=_index(device), device_type=1),
        "device_count": lambda: devices,
        "device_memory_used": lambda device=None: native.memory()[0],
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "init": lambda: None,
        "ipc_collect": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda device=None: native.memory()[1],
        "max_memory_reserved": lambda device=None: native.memory()[1],
        "mem_get_info": lambda device=None: ((8 << 30) - native.memory()[0], 8 << 30),
        "memory_allocated": lambda device=None: native.memory()[0],
        "memory_reserved": lambda device=None: native.memory()[0],
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(),
        "set_device": lambda device: native.set_device(_index(device)),
        "set_stream": lambda stream: None if stream is None else torch._C._accelerator_setStream(stream),
        "synchronize": lambda device=None: native.synchronize(),
    }


def _private_answers(devices: int, answers: dict[str, Any]) -> dict[str, Any]:
    """What replaces functions that torch's own code asks instead."""

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch._C._accelerator_setStream(
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    return {
        "_cuda_emptyCache": lambda: None,
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getDevice": native.current_device,
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_memoryStats": answers["memory_stats"],
        "_cuda_setDevice": native.set_device,
        "_cuda_setMemoryFraction": lambda share, device: native.set_limit(share),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": native.synchronize,
        "_nccl_version": lambda: 22703,
    }


def _give_storages_memory() -> None:
    """Storages by their number of bytes, which a torch for the CPU refuses for this device."""
    storage: Any = torch.UntypedStorage
    new, resize = storage.__new__, storage.resize_

    def device_new(cls: Any, *args: Any, device: Any = None, **given: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **({} if device is None else {"device": device}), **given)
        return native.bytes(int(args[0]) if args else 0, _index(device)).untyped_storage()

    def device_resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        native.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    storage.__new__, storage.resize_ = staticmethod(device_new), device_resize
