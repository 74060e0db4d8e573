"""How much memory each process will need beside that of libraries, data and activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_pipe.config import Sharding
from lightning_pipe.local_parts import TENSOR, pieces
from lightning_pipe.partition import ParameterPlace
from lightning_pipe.planning.cost_profile import MOMENTS
from lightning_pipe.schedules.action import Placement
from lightning_pipe.text import memory
from lightning_pipe.transport.topology import Topology

PIECES = 64 << 20
"""What a process needs to send its part of a checkpoint, beside its share: a few pieces of 16 MiB."""
_SHOWN = 8


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes that one process needs.

    Args:
        process: its global rank.
        build: in host memory, while the module is built and divided.
        step: in the memory of its device from the first optimizer step on.
        saving: in host memory, while a checkpoint of one file is written.
        on_device: whether the device has memory of its own; otherwise it is the host's.
    """

    process: int
    build: int
    step: int
    saving: int
    on_device: bool


def training_factor(holders: int, sharding: Sharding, accumulated: bool = False) -> float:
    """Gradients and optimizer state of a holder, in multiples of the parameter; gradients are whole during a batch.

    Args:
        holders: of the parameter.
        sharding: what they divide.
        accumulated: whether gradients of earlier batches are kept beside those of a batch.

    Example:
        >>> [training_factor(4, sharding, accumulated=True) for sharding in (False, True, "gradients", "parameters")]
        [4.0, 2.5, 1.75, 2.0]
    """
    kept = 1 / holders if sharding in ("gradients", "parameters") else 1.0
    # beside the whole parameters of a batch each has its part, which the optimizer updates
    part = 1 / holders if sharding == "parameters" else 0.0
    return 1 + part + accumulated * kept + MOMENTS / (holders if sharding else 1)


@dataclass(frozen=True)
class ParameterBytes:
    """Parameters in the memory of a process that holds them.

    Args:
        holders: how many processes hold a parameter, by its name.
        number_bytes: bytes of a number; ``None``: as in each parameter.
        sharding: what the holders of a parameter divide.
        accumulated: whether gradients of earlier batches are kept beside those of a batch.
    """

    holders: Mapping[str, int]
    number_bytes: int | None = None
    sharding: Sharding = False
    accumulated: bool = False

    def size(self, one: ParameterPlace) -> int:
        """Bytes of its values; of what tensor ranks divide those of one of them."""
        return one.size * (self.number_bytes or one.parameter.element_size()) // pieces(one.parameter, TENSOR)

    def step(self, places: Iterable[ParameterPlace]) -> int:
        """Bytes of values, gradients and optimizer state; gradients are whole during a batch."""
        held = 0.0
        for one in places:
            trained = one.parameter.requires_grad
            beside = training_factor(self.holders[one.name], self.sharding, self.accumulated) if trained else 0.0
            held += self.size(one) * (1 + beside)
        return int(held)


def sharding_notes(sharding: Sharding) -> tuple[str, ...]:
    """What a plan says of it."""
    if not sharding:
        return ()
    sums = " and, once they are summed, its gradients" if sharding == "gradients" else ""
    if sharding == "parameters":
        sums = ", its gradients once they are summed, and between batches its values"
    return (f"shard_optimizer={sharding!r}: the holders of a parameter divide its optimizer state{sums}",)


def process_memories(
    held: Sequence[Sequence[ParameterPlace]],
    placement: Placement,
    topology: Topology,
    bytes_of: ParameterBytes,
    *,
    built: int = 0,
    on_device: bool = False,
) -> tuple[ProcessMemory, ...]:
    """The memory of every process, in the order of their numbers.

    Args:
        held: for every stage the parameters that it holds.
        placement: which rank computes a stage.
        topology: which process is which rank.
        bytes_of: parameters in memory.
        built: bytes that every process has built whole; 0: each makes its own parameters alone.
        on_device: whether devices have memory of their own.
    """

    def saved(ones: Iterable[ParameterPlace]) -> int:
        return sum(bytes_of.size(one) * (1 + MOMENTS * one.parameter.requires_grad) for one in ones)

    everyone = {one.name: one for own in held for one in own}
    everywhere = {one.name: one for own in held for one in own if one.beside}  # until a batch shows who uses them
    found = []
    for process in range(topology.world_size):
        rank = topology.locate(process)[1]
        stages = {stage for (_, stage), place in placement.items() if place == rank}
        own = {one.name: one for stage in stages for one in held[stage]}
        step, largest = bytes_of.step(own.values()), max(map(bytes_of.size, own.values()), default=0)
        build = max(built, sum(map(bytes_of.size, {**own, **everywhere}.values())) + largest)
        saving = PIECES + (largest if on_device else step)
        if process == 0:  # gathers what it has not, and writes all of it by way of its memory
            gathered = saved(everyone.values()) - (0 if on_device else saved(own.values()))
            saving = (0 if on_device else step) + gathered + saved(everyone.values())
        found.append(ProcessMemory(process, build, step, saving, on_device))
    return tuple(found)


def memory_facts(processes: Sequence[ProcessMemory]) -> list[tuple[str, str]]:
    """Lines of the plan.

    Args:
        processes: of all processes; of many the largest values alone are shown.

    Example:
        >>> for name, line in memory_facts([ProcessMemory(0, 2 << 30, 8 << 30, 1 << 20, True)]):
        ...     print(f"{name}: {line}")
        Host: rank 0: 2 GiB to build, 1 MiB while saving
        Device: rank 0: 8 GiB from the first step on
    """
    if not processes:
        return []
    rows = [(f"rank {one.process}", one.build, one.step, one.saving) for one in processes]
    if len(rows) > _SHOWN:
        most = (max(row[column] for row in rows) for column in (1, 2, 3))
        rows = [(f"the most of {len(rows)} ranks", *most)]  # type: ignore[list-item]
    if not processes[0].on_device:
        lines = [
            f"{who}: {memory(build)} to build, {memory(step)} from the first step on, {memory(saving)} while saving"
            for who, build, step, saving in rows
        ]
        return [("Host", lines[0]), *(("", line) for line in lines[1:])]
    host = [f"{who}: {memory(build)} to build, {memory(saving)} while saving" for who, build, _, saving in rows]
    device = [f"{who}: {memory(step)} from the first step on" for who, _, step, _ in rows]
    names = ["Host", *[""] * (len(rows) - 1), "Device", *[""] * (len(rows) - 1)]
    return list(zip(names, host + device, strict=True))
