"""Points of `tests.trainer.test_equality` whose parameters several processes divide, and modules to divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.local_parts import dimensions, whole
from tests.support import oracle
from tests.support.model_zoo import ZOO, Entry
from tests.support.oracle import Trace
from tests.support.processes import run_trainers
from tests.support.trainer_runs import quiet
from tests.support.zoo.base import WIDTH, Module, Regression
from tests.support.zoo.hugging_face import HuggingFace, gpt2, llama, mean_of_tokens, small
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

    Layer = Pair

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class Rated(torch.optim.SGD):
    """Gives each parameter a rate by its gradient, and by a mark on it."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if (gradient := parameter.grad) is not None:
                size = 1.0 + gradient.norm().item() + float(gradient.sum()) ** 2 + (gradient > 0).sum().item()
                gradient.mul_(getattr(parameter, "rate", 1.0) / size)
        super().step()
        return loss


def slow_down(parameter: Tensor) -> None:
    """A hook for the gradient of a parameter."""
    parameter.rate = 0.2  # type: ignore[attr-defined]


class Marked(Pairs):
    """Marks parameters and hooks on to them before they are divided; its optimizer reads numbers of gradients."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.layers[0].parameters():
            parameter.rate = 0.1  # type: ignore[attr-defined]
        self.embed.weight.register_hook(lambda gradient: gradient * 3.0)
        self.layers[1].up.weight.register_hook(lambda gradient: gradient * 3.0)
        self.layers[2].up.weight.register_post_accumulate_grad_hook(slow_down)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Rated(self.parameters(), lr=1.0)


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


def divide_rows(layer: nn.Module, mesh: Any) -> None:
    """Between the layers each tensor rank has a part of the rows, as sequence parallelism has of positions."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    rows, everything = Shard(0), Replicate()
    if isinstance(layer, Pair):
        norm = SequenceParallel(sequence_dim=0)
        up, down = ColwiseParallel(input_layouts=rows), RowwiseParallel(output_layouts=rows)
        parallelize_module(layer, mesh, {"norm": norm, "up": up, "down": down})
    elif isinstance(layer, nn.Linear) and layer.out_features == WIDTH:
        parallelize_module(layer, mesh, ColwiseParallel(output_layouts=rows))
    else:
        parallelize_module(layer, mesh, RowwiseParallel(input_layouts=rows, output_layouts=everything))


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


def mixtral() -> Module:
    """Experts, whose router computes in the type of the model: weights in single precision round each rank's sum."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    class Router(MixtralTopKRouter):
        def forward(self, hidden_states: Tensor) -> Any:
            logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
            top, indices = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
            return logits, top / top.sum(dim=-1, keepdim=True), indices

    model = MixtralForCausalLM(small(MixtralConfig, num_local_experts=4, num_key_value_heads=2))
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = Router
    model.set_experts_implementation("eager")
    model.loss_function = mean_of_tokens
    return HuggingFace(model)


def qwen3() -> Module:
    """Norms of heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(small(Qwen3Config, num_key_value_heads=2, head_dim=8))
    model.loss_function = mean_of_tokens
    return HuggingFace(model)


def divide_decoder(layer: nn.Module, mesh: Any) -> None:
    """Tensor parallelism of a layer of Llama, and of the attention of one of Mixtral."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    up, down = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    styles = {**dict.fromkeys(up, ColwiseParallel()), **dict.fromkeys(down, RowwiseParallel())}
    for name, part in layer.named_modules():
        if isinstance(part, nn.Linear) and name.rpartition(".")[2] in styles:
            parallelize_module(part, mesh, styles[name.rpartition(".")[2]])


class DividedHuggingFace(HuggingFace):
    """Divides itself as Lightning's page does: its layers, and then the model around them."""

    def __init__(self, whole: HuggingFace, divide: Callable[..., None]) -> None:
        super().__init__(whole.model)
        self.divide = divide

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is None:
            return
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        base = self.model.base_model
        for layer in base.h if hasattr(base, "h") else base.layers:
            if tensor.size() > 1:
                self.divide(layer, tensor)
            fully_shard(layer, mesh=data)
        fully_shard(self.model, mesh=data)


def divided(make: Callable[[], Any], divide: Callable[..., None]) -> Callable[[], Module]:
    """Makes a model of Transformers that divides itself."""
    return lambda: DividedHuggingFace(make(), divide)


MODELS: dict[str, Entry] = {
    **ZOO,
    "mixtral": Entry("mixtral", mixtral, ZOO["llama"].batches),
    "qwen3": Entry("qwen3", qwen3, ZOO["llama"].batches),
    "pairs": Entry("pairs", Pairs),
    "rows": Entry("rows", Pairs),
    "marked": Entry("marked", Marked),
    "divides_itself": Entry("divides_itself", DividesItself),
    "divided_gpt2": Entry("divided_gpt2", divided(gpt2, divide_gpt2), ZOO["gpt2"].batches),
    "divided_llama": Entry("divided_llama", divided(llama, divide_decoder), ZOO["llama"].batches),
    "divided_mixtral": Entry("divided_mixtral", divided(mixtral, divide_decoder), ZOO["llama"].batches),
}
FAMILIES = ["gpt2", "llama", "mixtral", "divides_itself"]
"""Three models of Transformers, and a plain module with a `configure_model` of its own: they run in all dimensions."""
PARALLELIZE: dict[str, Callable[..., Any]] = {
    "gpt2": divide_gpt2,
    **dict.fromkeys(["pairs", "marked"], divide_pair),
    "rows": divide_rows,
}
"""What divides the layers of models without a plan of their own."""


@dataclass(frozen=True)
class Sharded(Point):
    """A point with parameters in parts.

    Args:
        tensor: processes that compute a layer together.
        parameters: whether the replicas divide parameters.
        recompute: of the strategy.
        reshard: whether only the stage that computes is whole.
        looks: whether losses are compared in the first batch.
    """

    tensor: int = 1
    parameters: bool = True
    recompute: str = "never"
    reshard: bool = False
    looks: bool = True

    def __str__(self) -> str:
        return f"{super().__str__()}-t{self.tensor}" + "-fsdp" * self.parameters + "-reshard" * self.reshard

    @property
    def strategy(self) -> dict[str, Any]:
        return {
            **super().strategy,
            "shard_optimizer": "parameters" if self.parameters else False,
            "tensor_parallel_size": self.tensor,
            "recompute": self.recompute,
            "reshard_after_forward": self.reshard,
            "compare_losses": self.looks,
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


class Weights(L.Callback):
    """Puts together the parameters that this process has a part of."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = {name: p for name, p in pl_module.named_parameters() if not is_absent(p)}
        # cloned: FSDP frees what is whole when a validation has gathered it
        self.found = {name: whole(p.detach()).clone() for name, p in held.items()}


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
        if name.startswith("divide"):
            options["shard_optimizer"] = False
        kinds, weights = Kinds(), Weights()
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
                callbacks=[kinds, weights],
            )
        except BaseException as error:
            error.add_note(f"model {name}")
            raise
        if name.startswith("divide"):  # it stays in parts, on the ranks of its stages
            trace.weights = weights.found
        found.append((trace, kinds.found))
    return found


def check(names: Sequence[str], point: Sharded, divided: str, timeout: float = 100.0) -> None:
    """Train several models in the same processes, and `compare`. The limit is in seconds."""
    found = run_trainers(fit_all, point.devices, names=list(names), point=point, timeout=timeout)
    compare(found, names, point, divided)


def compare(found: Sequence[Any], names: Sequence[str], point: Sharded, divided: str) -> None:
    """All processes against one device.

    Args:
        found: by process what `fit_all` returned.
        names: of the models.
        point: where.
        divided: the dimensions over which some parameter of each model must have been divided.
    """
    wrong: list[str] = []
    for index, name in enumerate(names):
        kinds = {kind for of_process in found for kind in of_process[index][1]}
        assert any(divided in kind for kind in kinds), f"{name}: {kinds}"
        held = set[str]()
        for process, of_process in enumerate(found):
            trace, truth = of_process[index][0], expected(MODELS[name], point, point.replica(process))
            assert trace.losses
            held |= trace.weights.keys()
            if name.startswith("divide"):
                truth = replace(truth, weights={each: truth.weights[each] for each in trace.weights})
            wrong += [f"{name}, process {process}: {line}" for line in oracle.differences(trace, truth)]
        assert held == expected(MODELS[name], point, 0).weights.keys()
    assert not wrong, "\n  ".join(wrong[:30])
