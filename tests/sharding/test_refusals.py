"""What does not go with divided parameters is refused, with what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy, schedules
from lightning_pipe.config import layout
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.parameters.mixing import check as check_optimizer
from lightning_pipe.sharding.fully_sharded import FullySharded
from lightning_pipe.sharding.roots import Root, left_whole, roots_of, stages_of_parts, tied
from lightning_pipe.sharding.styles import EXPERTS, apply_style
from lightning_pipe.sharding.tensor_parallel import (
    check_alike,
    check_even,
    check_tied,
    hooks_inside,
    plan_of,
)
from lightning_pipe.trainer.model_sharding import check
from tests.support import oracle, processes
from tests.support.pairs import slow_but
from tests.support.sharded_runs import MODELS, Pair, divide_pair
from tests.support.trainer_runs import QUIET, quiet


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_optimizer": "weights"}, "not supported"),
        ({"shard_optimizer": True, "tensor_parallel_size": 2}, "has parts of them"),
        ({"parallelize": lambda layer, mesh: None}, "tensor_parallel_size is 1"),
        ({"tensor_parallel_size": "auto"}, "a whole number is needed"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipeStrategy(**options)


def test_a_world_that_the_sizes_do_not_divide() -> None:
    assert layout(8, pipeline_parallel_size=2, tensor_parallel_size=2).data_parallel_size == 2
    with pytest.raises(ConfigurationError, match="not divisible by tensor_parallel_size=3"):
        layout(8, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("schedule", "callbacks", "message"),
    [
        ("chimera", [], "two ranks"),
        ("pipedream", [], "versions of the weights"),
        ("1f1b", [EMAWeightAveraging()], "EMAWeightAveraging"),
    ],
)
def test_runs(schedule: str, callbacks: list[Any], message: str) -> None:
    family = schedules.get(schedule)
    trainer = SimpleNamespace(callbacks=callbacks)
    module: Any = nn.Linear(2, 2)
    module.trainer = trainer
    pipeline: Any = SimpleNamespace(family=family, synchronous=schedule != "pipedream")
    with pytest.raises(ConfigurationError, match=message):
        check(module, pipeline)


def test_compiled_layers() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module.trainer = SimpleNamespace(callbacks=[])
    pipeline: Any = SimpleNamespace(family=schedules.get("1f1b"), synchronous=True)
    check(module, pipeline)
    module[0].compile(backend="eager")
    with pytest.raises(ConfigurationError, match="compiled"):
        check(module, pipeline)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"part": "ep_dispatch_experts"}, "divides 'part' by the style 'ep_dispatch_experts'"),
        ({"part": "packed_colwise"}, "divides 'part' by the style 'packed_colwise'"),
        ({"part.bias": "colwise"}, "divides 'part' by the style None and its parameters by {'weight': None, 'bias'"),
        ({"part": EXPERTS, "part.weight": "packed_colwise"}, "by {'weight': 'packed_colwise', 'bias': None}"),
    ],
)
def test_styles_without_a_counterpart(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        apply_style("part", nn.Bilinear(2, 2, 2), None, plan.get)


def test_heads_that_tensor_ranks_do_not_divide() -> None:
    module = MODELS["llama"].build()
    with pytest.raises(ConfigurationError, match="num_attention_heads=2, which tensor_parallel_size=3 does not divide"):
        plan_of(module, 3)
    module.model.config.num_key_value_heads = 1
    with pytest.raises(ConfigurationError, match="num_key_value_heads=1, which tensor_parallel_size=2 does not divide"):
        plan_of(module, 2)


def test_plans_of_transformers_are_found() -> None:
    plan = plan_of(MODELS["llama"].build(), 2)
    assert plan["model.model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.lm_head"] == "colwise_gather_output"
    assert plan_of(MODELS["gpt2"].build(), 2) == {}


def test_a_tied_weight_that_is_divided_in_one_place() -> None:
    module = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    module["other"].weight = module["one"].weight
    before = dict(module.named_parameters(remove_duplicate=False))
    check_tied(before, module)
    module["other"].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=r"'one.weight' and 'other.weight' were one parameter"):
        check_tied(before, module)


REFUSED = {
    "weight": "'layers.0.up.weight' and 'layers.1.up.weight' were one parameter",
    "module": "'layers.1.up' belongs to several layers",
    "computed": "The plan of tensor parallelism fails for 'layers.1'",
}
TRAINED = ("left out", "guessed")
COMMON = {"micro_batches": 2, "compare_losses": False}
BEHIND = "A run of these processes with divided parameters has failed"


def fit_unusual(process: int, refused: str) -> dict[str, Any]:
    """What an error says, or the weights, of each kind; then of a run behind an error."""
    quiet()
    options: dict[str, Any] = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, **COMMON}
    found: dict[str, Any] = {}
    for kind in (*TRAINED, refused, "behind"):
        strategy = PipeStrategy(**options, parallelize=divide_down if kind == "left out" else divide_pair)
        try:
            found[kind] = oracle.fit(unusual(kind), MODELS["pairs"].batches(2), strategy=strategy, devices=2).weights
        except ConfigurationError as error:
            found[kind] = str(error)
    return found


def unusual(kind: str) -> Any:
    module = MODELS["pairs"].build()
    if kind == "weight":
        module.layers[1].up.weight = module.layers[0].up.weight
    elif kind == "computed":
        nn.utils.parametrizations.weight_norm(module.layers[1].up)
    elif kind == "guessed":
        module.others = copy.deepcopy(module.layers)
    elif kind in ("module", "left out"):
        module.layers[1].up = module.layers[0].up
    return module


def divide_down(layer: nn.Module, mesh: Any) -> None:
    if isinstance(layer, Pair):
        parallelize_module(layer.down, mesh, RowwiseParallel(input_layouts=Replicate()))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("refused", slow_but(REFUSED, "computed"))
def test_what_is_refused_before_torch_fails(refused: str) -> None:
    """And no run goes on behind that in the same processes: torch would use connections that have ended."""
    truths = {kind: oracle.fit(unusual(kind), MODELS["pairs"].batches(2)).weights for kind in TRAINED}
    for found in processes.run_trainers(fit_unusual, 2, timeout=80, refused=refused):
        assert REFUSED[refused] in found[refused]
        assert BEHIND in found["behind"]
        for kind, truth in truths.items():
            oracle.assert_equal(oracle.Trace(weights=found[kind]), oracle.Trace(weights=truth))


class DTensor(Tensor):
    """Looks like torch's, over two tensor ranks."""

    placements = (Shard(0),)
    device_mesh = SimpleNamespace(mesh_dim_names=("tensor_parallel",), size=lambda: 2)


@pytest.mark.parametrize(("rows", "even"), [(8, True), (6, False), (5, False)])
def test_sizes_that_do_not_divide(rows: int, even: bool) -> None:
    class Layer(nn.Module):
        def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
            yield f"{prefix}.weight", torch.ones(rows, 3).as_subclass(DTensor)

    root = Root("blocks.0", Layer(), 0)
    if even:
        check_even(root, 2)
        return
    with pytest.raises(ConfigurationError, match=rf"Dimension 0 of 'blocks.0.weight' has {rows} places"):
        check_even(root, 2)


def test_whole_parameters_of_which_tensor_ranks_see_different_values() -> None:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    places = SimpleNamespace(tensor=2, tensor_processes=lambda process: (0, 1))
    transport: Any = SimpleNamespace(topology=places, process=0, all_gather_object=lambda own, members: [own, own])
    check_alike(module, transport)
    transport.all_gather_object = lambda own, members: [own, {**own, "bias": (-1.0, 1.0)}]
    with pytest.raises(ConfigurationError, match="different gradients of 'bias', which is whole on each of them"):
        check_alike(module, transport)


ALONE: Any = SimpleNamespace(layout=SimpleNamespace(world_size=1))


class DividesInAHelper(L.LightningModule):
    """Its ``configure_model`` does not name the mesh itself."""

    def configure_model(self) -> None:
        self.divide()

    def divide(self) -> list[Any]:
        return [self.device_mesh for _ in range(2)]


def test_modules_that_ask_for_the_mesh_are_found() -> None:
    sharding = PipeStrategy().sharding
    sharding.connect(DividesInAHelper(), ALONE)
    assert sharding.by_module
    sharding.connect(MODELS["pairs"].build(), ALONE)
    assert not sharding.by_module
    sharding.connect(MODELS["divides_itself"].build(), ALONE)
    assert sharding.by_module


@pytest.mark.parametrize("here", [True, False])
def test_a_module_that_divides_itself_over_tensor_ranks_alone(here: bool) -> None:
    """Wherever its parts are. What divides itself over both is trained in test_checkpoints and test_fully_sharded."""
    sharding = PipeStrategy(shard_optimizer="parameters").sharding
    module: Any = DividesInAHelper()
    sharding.connect(module, ALONE)
    sharding.mesh = {"data_parallel": SimpleNamespace(size=lambda: 2)}
    module.parameters = lambda: [torch.ones(2).as_subclass(DTensor)] if here else []
    places = SimpleNamespace(same_tensor_rank=())
    transport = SimpleNamespace(topology=places, all_gather_object=lambda own, members: [own, not here])
    run: Any = SimpleNamespace(pipeline=SimpleNamespace(transport=transport))
    with pytest.raises(ConfigurationError, match="does not divide what configure_model has divided over tensor ranks"):
        sharding.divide(module, run)


def test_a_layer_that_returns_a_part() -> None:
    layer = nn.Linear(2, 2)
    hooks_inside("blocks.0", layer)
    assert layer(torch.ones(1, 2)).shape == (1, 2)
    other = nn.Identity()
    hooks_inside("blocks.1", other)
    with pytest.raises(CutError, match=r"'blocks.1' returns a DTensor of shape \(1, 2\)"):
        other(torch.ones(1, 2).as_subclass(DTensor))


def test_what_replicas_do_not_divide() -> None:
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.LSTM(2, 2)])})
    module["head"] = nn.Linear(2, 2)
    module["head"].weight = module["blocks"][0].weight
    module.scale = nn.Parameter(torch.ones(1))
    layers = [(f"blocks.{number}", layer) for number, layer in enumerate(module["blocks"])]
    assert tied(module, layers) == {module["head"].weight}
    assert left_whole(module, layers) == {module["head"].weight, module.scale, *module["blocks"][2].parameters()}
    roots = roots_of(module, layers, [range(1), range(1, 3)], [1])
    assert [(root.name, root.stage) for root in roots] == [("blocks.1", 1), ("blocks.2", 1), ("head", None)]
    first, second, third = module["blocks"]
    stages = {second: 1, third: 1, module["head"]: None, module["blocks"]: None, module: None}
    assert stages_of_parts(module, roots, layers) == stages
    assert first not in stages


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "other"))
    dist.destroy_process_group()


def test_an_optimizer_is_tried_with_the_parts_that_a_checkpoint_has_given_it(mesh: Any) -> None:
    class Momentum(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                parameter.sub_(kept.mul_(0.9).add_(parameter.grad))

    module = fully_shard(nn.Linear(2, 2), mesh=mesh["data_parallel"])
    optimizer = Momentum(module.parameters(), {})
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check_optimizer(optimizer, dict(module.named_parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "gathers parameters in their own type"),
        ({"over": "other"}, "over another mesh than that of the replicas"),
        ({"together": True}, "fully_shard was given '0', '1' together, which are not in one stage"),
        ({}, None),
    ],
)
def test_what_a_module_may_ask_of_fully_shard(mesh: Any, options: dict[str, Any], message: str | None) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    module, own = nn.Sequential(*layers), dict(options)
    over, together = mesh[own.pop("over", "data_parallel")], own.pop("together", False)
    for each in [layers] if together else layers:
        fully_shard(each, mesh=over, **own)
    topology = SimpleNamespace(replica_processes=lambda rank: {0})
    transport: Any = SimpleNamespace(topology=topology, rank=0)
    stages = {layers[0]: 0, layers[1]: 1, module: None}
    names: Any = SimpleNamespace(also=lambda *_: None)
    if message is None:
        FullySharded(module, stages, transport, names)
        return
    with pytest.raises(ConfigurationError, match=message):
        FullySharded(module, stages, transport, names)


class Fails(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept: Tensor = self.layers(batch[0]).pow(2).mean()
        return self.kept

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.copies = [each.clone() for each in self.parameters()]  # graphs have what they are copies of
        raise ValueError("the user's own")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def failing(process: int) -> tuple[str, bool]:
    quiet()
    options: dict[str, Any] = {"pipeline_parallel_size": 1, "data_parallel_size": 2, **COMMON}
    strategy, module = PipeStrategy(layers="layers", shard_optimizer="parameters", **options), Fails()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="own") as error:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(16, 8)), 4))
    return str(error.value), "cpu" in vars(module)


def test_an_error_is_the_last_one_and_leaves_the_module_as_it_was() -> None:
    assert processes.run_trainers(failing, 2, timeout=60) == [("the user's own", False)] * 2


class Limited(Fails):
    """A forward pass changes a parameter: the norms of the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Embedding(4, 8, max_norm=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def limiting(process: int, **own: Any) -> None:
    quiet()
    options: dict[str, Any] = {"pipeline_parallel_size": 1, "data_parallel_size": 2, **COMMON, **own}
    strategy = PipeStrategy(layers="layers", shard_optimizer="parameters", **options)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match=r"(?s)shape \(4, 8\) has changed while .* on_train_batch_end"):
        trainer.fit(Limited(), DataLoader(TensorDataset(torch.arange(16) % 4), 4))


@pytest.mark.parametrize("own", [{}, {"reshard_after_forward": True, "compare_losses": False}], ids=str)
def test_parameters_that_change_in_forward_passes(own: dict[str, Any]) -> None:
    """Also where they go back into parts behind that pass, before anything else looks at them."""
    processes.run_trainers(limiting, 2, timeout=60, **own)
