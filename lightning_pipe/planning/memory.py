"""How much memory each process will need beside that of libraries, data and activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_pipe.partition import ParameterPlace
from lightning_pipe.planning.cost_profile import MOMENTS
from lightning_pipe.planning.division import Division, factors
from lightning_pipe.schedules.action import Placement
from lightning_pipe.simulate import Held
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
        held: in the memory of its device from the first optimizer step on, by what it is; without activations.
        step: the same in all, and activations where they are known.
        saving: in host memory, while a checkpoint of one file is written.
        on_device: whether the device has memory of its own; otherwise it is the host's.
    """

    process: int
    build: int
    held: Held
    step: int
    saving: int
    on_device: bool


@dataclass(frozen=True)
class HeldParameters:
    """The parameters of a plan, and who holds them.

    Args:
        stages: for every stage the parameters that it holds.
        placement: which rank computes a stage.
        topology: which process is which rank.
        division: what the holders of a parameter divide, and tensor ranks.
        accumulation: batches in an optimizer step.
    """

    stages: Sequence[Sequence[ParameterPlace]]
    placement: Placement
    topology: Topology
    division: Division
    accumulation: int

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks that hold each parameter, by its name."""
        ranks: dict[str, set[int]] = defaultdict(set)
        for (_, stage), rank in self.placement.items():
            for one in self.stages[stage]:
                ranks[one.name].add(rank)
        return {name: tuple(sorted(own)) for name, own in ranks.items()}

    def step(self, places: Iterable[ParameterPlace]) -> Held:
        """Bytes while a batch runs; gradients are whole, beside those that are kept of the batches before."""
        values = gradients = optimizer = 0.0
        for one in places:
            holders = self.topology.replicas * len(self.owners[one.name])
            size, own = self.division.size(one), factors(holders, self.division.of(one))
            trained = size * one.parameter.requires_grad
            values += size * own.values
            gradients += trained * (1 + (self.accumulation > 1) * own.summed)
            optimizer += trained * own.optimizer
        return Held(values, gradients, optimizer, 0)

    def processes(self, *, built: int = 0, on_device: bool = False) -> tuple[ProcessMemory, ...]:
        """The memory of every process, in the order of their numbers.

        Args:
            built: bytes that every process has built whole; 0: each makes its own parameters alone.
            on_device: whether devices have memory of their own.
        """
        size = self.division.whole_size
        everyone = {one.name: one for own in self.stages for one in own}
        everywhere = {name: one for name, one in everyone.items() if one.beside}  # until a batch shows who uses them
        written = sum(size(one) * (1 + MOMENTS * one.parameter.requires_grad) for one in everyone.values())
        found = []
        for process in range(self.topology.world_size):
            rank = self.topology.locate(process)[1]
            own = {name: one for name, one in everyone.items() if rank in self.owners[name]}
            step, largest = self.step(own.values()), max(map(size, own.values()), default=0)
            # layers are whole until they are made
            build = max(built, sum(map(size, {**own, **everywhere}.values())) + largest)
            saving = PIECES + (largest if on_device else int(step.total))
            if process == 0:  # gathers what it has not, and writes all of it by way of its memory
                saving = 2 * written + (0 if on_device else int(step.gradients))
            found.append(ProcessMemory(process, build, step, int(step.total), saving, on_device))
        return tuple(found)


def memory_facts(processes: Sequence[ProcessMemory]) -> list[tuple[str, str]]:
    """Lines of the plan.

    Args:
        processes: of all processes; of many the largest values alone are shown.

    Example:
        >>> for name, line in memory_facts([ProcessMemory(0, 2 << 30, Held(0, 0, 0, 0), 8 << 30, 1 << 20, True)]):
        ...     print(f"{name}: {line}")
        Memory: rank 0: 2 GiB to build, 8 GiB on the device from the first step on, 1 MiB while saving
    """
    if not processes:
        return []
    rows = [(f"rank {one.process}", one.build, one.step, one.saving) for one in processes]
    if len(rows) > _SHOWN:
        most = (max(row[column] for row in rows) for column in (1, 2, 3))
        rows = [(f"the most of {len(rows)} ranks", *most)]  # type: ignore[list-item]
    where = " on the device" if processes[0].on_device else ""
    lines = [
        f"{who}: {memory(build)} to build, {memory(step)}{where} from the first step on, {memory(saving)} while saving"
        for who, build, step, saving in rows
    ]
    return list(zip(["Memory", *[""] * (len(lines) - 1)], lines, strict=True))
