"""Points of `tests.trainer.test_equality` whose parameters several processes divide, and modules to divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_pipe.local_parts import dimensions
from tests.support import oracle
from tests.support.model_zoo import ZOO, Entry
from tests.support.oracle import Trace
from tests.support.processes import run_trainers
from tests.support.trainer_runs import quiet
from tests.support.zoo.base import WIDTH, Regression
from tests.trainer.test_equality import Point, expected


class Pair(nn.Module):
    """Two linear layers, of which tensor parallelism divides the first by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Pairs(Regression):
    """Layers of `Pair`, which others divide."""

    def __init__(self) -> None:
        super().__init__([Pair() for _ in range(4)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class DividesItself(Pairs):
    """Divides its layers in ``configure_model``, as Lightning's page about two-dimensional parallelism does."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.device_mesh is None:  # on one device
            return
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        for layer in self.layers:
            if tensor.size() > 1:
                parallelize_module(layer, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=data)
        for part in (self.embed, self.head):
            fully_shard(part, mesh=data)


def divide_pair(layer: nn.Module, mesh: Any) -> None:
    """Tensor parallelism of a `Pair`, as ``parallelize=`` says it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if isinstance(layer, Pair):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def divide_gpt2(layer: nn.Module, mesh: Any) -> None:
    """Tensor parallelism of a block of GPT-2, for which Transformers has no plan: of its feed-forward part."""
    mlp = getattr(layer, "mlp", None)
    if mlp is not None:
        _divide_conv(mlp.c_fc, mesh, columns=True)
        _divide_conv(mlp.c_proj, mesh, columns=False)


def _divide_conv(part: nn.Module, mesh: Any, *, columns: bool) -> None:
    """Divide a Conv1D of Transformers: a linear layer whose weight is the other way round."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def parameters(name: str, module: nn.Module, mesh: Any) -> None:
        places = {"weight": Shard(1 if columns else 0), "bias": Shard(0) if columns else Replicate()}
        for key, place in places.items():
            divided = distribute_tensor(getattr(module, key), mesh, [place])
            module.register_parameter(key, nn.Parameter(divided))

    def before(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate() if columns else Shard(-1)], run_check=False)

    def behind(module: nn.Module, output: Any, mesh: Any) -> Any:
        return output.redistribute(placements=[Shard(-1) if columns else Replicate()]).to_local()

    distribute_module(part, mesh, parameters, before, behind)


MODELS: dict[str, Entry] = {
    **ZOO,
    "pairs": Entry("pairs", Pairs),
    "divides_itself": Entry("divides_itself", DividesItself),
}
PARALLELIZE: dict[str, Callable[..., Any]] = {"gpt2": divide_gpt2, "pairs": divide_pair}
"""What divides the layers of models without a plan of their own."""


@dataclass(frozen=True)
class Sharded(Point):
    """A point with parameters in parts.

    Args:
        tensor: processes that compute a layer together.
        parameters: whether the replicas divide parameters.
        recompute: of the strategy.
    """

    tensor: int = 1
    parameters: bool = True
    recompute: str = "never"

    def __str__(self) -> str:
        return f"{super().__str__()}-t{self.tensor}" + "-fsdp" * self.parameters

    @property
    def strategy(self) -> dict[str, Any]:
        return {
            **super().strategy,
            "shard_optimizer": "parameters" if self.parameters else False,
            "tensor_parallel_size": self.tensor,
            "recompute": self.recompute,
        }

    @property
    def devices(self) -> int:
        """Processes."""
        return self.ranks * self.replicas * self.tensor

    def replica(self, process: int) -> int:
        return super().replica(process // self.tensor)


class Kinds(L.Callback):
    """Notes over which dimensions parameters are divided when the optimizer steps."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.found |= {"x".join(sorted(dimensions(parameter))) for parameter in pl_module.parameters()}


def fit_all(process: int, names: list[str], point: Sharded) -> list[tuple[Trace, set[str]]]:
    """What one process runs: every model with a Trainer of its own; with the ways in which parameters were divided."""
    from lightning_pipe import PipeStrategy

    quiet()
    replica = point.replica(process)
    found = []
    for name in names:
        entry = MODELS[name]
        batches = point.batches(entry, replica)
        options = dict(point.strategy)
        if name in PARALLELIZE and point.tensor > 1:
            options["parallelize"] = PARALLELIZE[name]
        if name == "divides_itself":
            options["shard_optimizer"] = False
        kinds = Kinds()
        module = entry.build()
        try:
            trace = oracle.fit(
                module,
                batches,
                point.accumulate,
                validation=entry.batches(2),
                strategy=PipeStrategy(layers=entry.layers, **options),
                devices=point.devices,
                use_distributed_sampler=False,
                callbacks=[kinds],
            )
        except BaseException as error:
            error.add_note(f"model {name}")
            raise
        if name == "divides_itself":  # it stays in parts
            trace.weights = {}
        found.append((trace, kinds.found))
    return found


def check(names: Sequence[str], point: Sharded, divided: str, timeout: float = 100.0) -> None:
    """All processes against one device, for several models in the same processes.

    Args:
        names: of the models.
        point: where.
        divided: the dimensions over which some parameter of each model must have been divided.
        timeout: seconds.
    """
    found = run_trainers(fit_all, point.devices, names=list(names), point=point, timeout=timeout)
    wrong: list[str] = []
    for index, name in enumerate(names):
        kinds = {kind for of_process in found for kind in of_process[index][1]}
        assert any(divided in kind for kind in kinds), f"{name}: {kinds}"
        for process, of_process in enumerate(found):
            trace, truth = of_process[index][0], expected(MODELS[name], point, point.replica(process))
            assert trace.losses
            wrong += [f"{name}, process {process}: {line}" for line in oracle.differences(trace, truth)]
    assert not wrong, "\n  ".join(wrong[:30])
