"""Modules that are built without memory, and divided: each layer gets its values when it is divided, not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipe.construction import deferred as recording
from lightning_pipe.construction import is_deferred
from lightning_pipe.errors import PartitionError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.local_parts import local
from lightning_pipe.sharding.roots import Root
from lightning_pipe.trainer import model_sharding
from tests.support import oracle
from tests.support.oracle import Trace
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.sharded_runs import Kinds
from tests.support.trainer_runs import QUIET, quiet
from tests.support.zoo.base import Module

WIDTH = 48
"""A weight of so many rows and columns in double precision is recorded: it has more than 16 KiB."""
DEPTH = 4
"""Layers of the modules whose memory is measured: of the whole module a process keeps half, and never has all."""
SEED = 5
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "2x2x1": ({"data_parallel_size": 2, "shard_optimizer": "parameters"}, (0, 1)),
    "1x2x1": ({"data_parallel_size": 2, "shard_optimizer": "parameters"}, (0,)),
    "1x2x2": ({"data_parallel_size": 2, "shard_optimizer": "parameters", "tensor_parallel_size": 2}, (0,)),
    "2x1x2": ({"tensor_parallel_size": 2}, (0, 2)),
    "1x1x2": ({"tensor_parallel_size": 2}, (0,)),
}
"""Pipeline ranks x replicas x tensor ranks: the strategy's options, and the processes whose first values count."""


class Wide(nn.Module):
    """A layer as of `Pair`, with buffers that come from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.orthogonal_(self.up.weight)
        self.divisors = [WIDTH]  # which stages compare
        self.register_buffer("scale", self.up.weight.detach().abs().mean(0) + torch.rand(WIDTH, WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) @ self.scale / self.divisors[0] + self.shift.mean(0)


class Recorded(Module):
    """Embeddings and a head that are tied."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Wide() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((self.head(x) + self.bias.mean(0)).flatten(0, 1), batch.flatten())


class Untied(Recorded):
    """The last rank alone has the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Pretrained(Module):
    """A model of Transformers from a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.model = folder, None
        self.build()

    def build(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)

    def loss(self, batch: Tensor) -> Tensor:
        # Transformers' own loss is in single precision
        return nn.functional.cross_entropy(self.model(input_ids=batch).logits.flatten(0, 1), batch.flatten())


class PretrainedLater(Pretrained):
    """Its model is there once ``configure_model`` has run."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if self.model is None:
            super().build()


def save_llama(folder: Path, depth: int = 2) -> None:
    """Write a Llama whose weights are large enough to be read late."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WIDTH, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": depth}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).double().save_pretrained(folder)


def batches(number: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(0, WIDTH, (8, 6), generator=draw) for _ in range(number)]


def make(way: str, folder: str, trainer: L.Trainer) -> Module:
    """A module, in the way that users build it."""
    kinds = {"recorded": Recorded, "untied": Untied, "divides_itself": DividesItself}
    with nullcontext() if way == "configure_model" else trainer.init_module():
        files = Pretrained if way == "pretrained" else PretrainedLater
        module: Module = kinds[way]() if way in kinds else files(folder)
    return module


def fit(process: int, way: str, folder: str, layout: str | None) -> Trace:
    """Validate, train, and train once more; processes that hold others' copies begin with other random numbers."""
    from lightning_pipe import PipeStrategy

    quiet()
    options: dict[str, Any] = {"devices": 1, "strategy": "auto"}
    first: tuple[int, ...] = (0,)
    if layout is not None:
        sizes, first = LAYOUTS[layout]
        own = {"parallelize": divide_wide} if way == "recorded" and "tensor_parallel_size" in sizes else {}
        ranks = int(layout[0])
        strategy = PipeStrategy("1f1b", 2, ranks, **sizes, **own)
        options = {"devices": processes_of(layout), "strategy": strategy, "use_distributed_sampler": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, precision="64-true", **options, **QUIET)
    torch.manual_seed(SEED if process in first else SEED + process)
    module = make(way, folder, trainer)
    if layout is not None and way != "configure_model":
        assert any(map(is_deferred, module.parameters()))
    recorder, kinds = oracle.Recorder(), Kinds()
    trainer.callbacks += [recorder, kinds]
    trainer.validate(module, oracle.loader(batches(1)), verbose=False)
    trainer.fit(module, oracle.loader(batches()))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, oracle.loader(batches(1)))
    assert layout is None or any(kinds.found), "nothing was divided"
    trace = recorder.trace
    trace.weights = oracle.state_of(module)
    return trace


def processes_of(layout: str) -> int:
    return prod(map(int, layout.split("x")))


def divide_wide(layer: nn.Module, mesh: Any) -> None:
    """Tensor parallelism of a `Wide`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if isinstance(layer, Wide):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("way", "layout"),
    slow_but(
        product(("recorded", "pretrained", "configure_model"), [each for each in LAYOUTS if each != "1x2x1"]),
        ("pretrained", "1x1x2"),  # further below a module over two pipeline ranks
    ),
)
def test_values_and_training_are_those_of_one_device(way: str, layout: str, tmp_path: Path) -> None:
    save_llama(tmp_path)
    truth = fit(0, "recorded" if way == "recorded" else "pretrained", str(tmp_path), None)
    assert len(truth.losses) == 3
    for trace in run_trainers(fit, processes_of(layout), way=way, folder=str(tmp_path), layout=layout, timeout=100):
        oracle.assert_equal(trace, truth)


def go_on(process: int, folder: str, way: str, layout: str) -> Trace:
    """What a run leaves that goes on from the folder of one."""
    from lightning_pipe import PipeStrategy

    sizes, _ = LAYOUTS[layout]
    own = {"parallelize": divide_wide} if "tensor_parallel_size" in sizes else {}
    for epochs, path in ((1, None), (2, f"{folder}/first")):
        options: dict[str, Any] = {**sizes, **own, "save_distributed_checkpoint": True, "compare_losses": False}
        strategy = PipeStrategy("1f1b", 2, int(layout[0]), stages=2, **options)
        trainer, module = fit_once(way, epochs, path, devices=processes_of(layout), strategy=strategy)
        if path is None:
            trainer.save_checkpoint(f"{folder}/first")
    return Trace(weights=oracle.state_of(module))


def fit_once(way: str, epochs: int, path: str | None = None, **options: Any) -> tuple[L.Trainer, Module]:
    """Train with a batch an epoch, on from a checkpoint or with the same numbers: of buffers that it lacks, too."""
    quiet()
    options = {"accelerator": "cpu", "devices": 1, "use_distributed_sampler": False, **options, **QUIET}
    trainer = L.Trainer(max_epochs=epochs, precision="64-true", **options)
    torch.manual_seed(SEED)
    module = make(way, "", trainer)
    trainer.fit(module, oracle.loader(batches(1)), ckpt_path=path, weights_only=False)
    return trainer, module


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("way", "layout"),
    slow_but([("untied", "2x2x1"), ("untied", "1x2x1"), ("recorded", "2x1x2")], ("untied", "1x2x1")),
)
def test_runs_that_go_on(way: str, layout: str, tmp_path: Path) -> None:
    truth = Trace(weights=oracle.state_of(fit_once(way, 2)[1]))
    processes, options = processes_of(layout), {"folder": str(tmp_path), "way": way, "layout": layout}
    for trace in run_trainers(go_on, processes, **options, timeout=100):
        oracle.assert_equal(trace, truth)


class DividesItself(Recorded):
    """Divides its layers in ``configure_model``; they were recorded before."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for layer in self.layers:
                divide_wide(layer, self.device_mesh["tensor_parallel"])


def fit_dividing_itself(process: int, ranks: int) -> list[float]:
    """The losses; the module stays in parts."""
    from lightning_pipe import PipeStrategy

    strategy = PipeStrategy("1f1b", 2, ranks, stages=2, tensor_parallel_size=2, compare_losses=False)
    recorder = oracle.Recorder()
    fit_once("divides_itself", 2, devices=2 * ranks, strategy=strategy, callbacks=[recorder])
    return recorder.trace.losses


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", slow_but([1, 2], 1))
def test_modules_that_divide_themselves(ranks: int) -> None:
    recorder = oracle.Recorder()
    fit_once("recorded", 2, callbacks=[recorder])
    for losses in run_trainers(fit_dividing_itself, 2 * ranks, ranks=ranks, timeout=100):
        oracle.assert_equal(Trace(losses=losses), Trace(losses=recorder.trace.losses))


class Viewed(Untied):
    """A buffer is a view of a weight, or as the error advises: the view is taken where it is used."""

    def __init__(self, *, mended: bool = False) -> None:
        super().__init__()
        if not mended:
            self.register_buffer("first", self.head.weight.detach()[:2])
        self.mended = mended

    def loss(self, batch: Tensor) -> Tensor:
        first = self.head.weight[:2].detach() if self.mended else self.first
        return super().loss(batch) + first.mean() * self.head.weight.mean()


class SameData(Untied):
    """Parameters with the same data, or as the error advises: one parameter."""

    def __init__(self, *, mended: bool = False) -> None:
        super().__init__()
        if mended:
            self.head.weight = self.embed.weight
        else:
            self.head.weight.data = self.embed.weight.data


MEMORY = {"Viewed": {}, "SameData": {"pipeline_parallel_size": 1, "data_parallel_size": 2}}
"""What is shared, and over what two processes are divided."""


def fit_aliases(process: int, kind: type[Untied], mended: bool) -> Trace | str:
    """What a run leaves, or its error."""
    from lightning_pipe import PipeStrategy

    sizes = MEMORY[kind.__name__]
    sharded = "parameters" if sizes else False
    strategy = PipeStrategy("1f1b", 2, **sizes, shard_optimizer=sharded, compare_losses=False)
    try:
        return fit_kind(kind, mended, strategy=strategy, devices=2)
    except PartitionError as error:
        return str(error)


def fit_kind(kind: Any, mended: bool, **options: Any) -> Trace:
    quiet()
    recorder = oracle.Recorder()
    trainer = L.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "precision": "64-true", "callbacks": [recorder], **options, **QUIET},
        use_distributed_sampler=False,
    )
    torch.manual_seed(SEED)
    with trainer.init_module():
        module = kind(mended=mended)
    trainer.fit(module, oracle.loader(batches()))
    return Trace(losses=recorder.trace.losses, weights=oracle.state_of(module))


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("kind", "shared"),
    slow_but(
        [(Viewed, "'head.weight' and 'first'"), (SameData, "'embed.weight' and 'head.weight'")],
        (Viewed, "'head.weight' and 'first'"),
    ),
)
def test_memory_that_tensors_share_is_refused_and_the_remedy_is_right(kind: type[Untied], shared: str) -> None:
    truth = fit_kind(kind, True, devices=1)
    for refused in run_trainers(fit_aliases, 2, kind=kind, mended=False, timeout=80):
        assert f"{shared} are different tensors with memory in common" in str(refused)
    for found in run_trainers(fit_aliases, 2, kind=kind, mended=True, timeout=80):
        assert isinstance(found, Trace)
        oracle.assert_equal(found, truth)


# ---------------------------------------------------------------------- memory


@contextmanager
def most_bytes() -> Iterator[list[int]]:
    """The bytes that parameters and buffers have together, each time that there are more of them."""
    alive: dict[int, tuple[StorageWeakRef, int]] = {}
    provide, shard, found = recording.provide, model_sharding.shard, [0]

    def note(*storages: Any) -> None:
        for storage in storages:
            alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        for key in [key for key, (storage, _) in alive.items() if storage.expired()]:
            del alive[key]
        found.append(sum(size for _, size in alive.values()))

    def provided(cells: Any) -> None:
        provide(cells)
        note(*(cell.memory for cell in cells))

    def divided(root: Root, *args: Any) -> None:
        shard(root, *args)
        note(*(local(tensor).untyped_storage() for tensor in root.module.parameters()))

    with patch.object(recording, "provide", provided), patch.object(model_sharding, "shard", divided):
        yield found


class Kept(L.Callback):
    """Notes the bytes of parameters and buffers that this process has when the run begins."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tensors = [each for each in (*pl_module.parameters(), *pl_module.buffers()) if type(each) is not AbsentTensor]
        self.found = sum(local(each).nbytes for each in tensors)


def peaks(process: int, folder: str) -> list[tuple[int, int, int]]:
    return [peak(each) for each in ("", folder)]


def peak(folder: str) -> tuple[int, int, int]:
    """The most bytes at the start of a run, those that stay, and those of a layer, of which there are `DEPTH`."""
    from lightning_pipe import PipeStrategy

    quiet()
    strategy = PipeStrategy("1f1b", 2, 1, data_parallel_size=2, shard_optimizer="parameters", compare_losses=False)
    kept, options = Kept(), {"max_epochs": 1, "use_distributed_sampler": False, "precision": "64-true"}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[kept], **options, **QUIET)
    with trainer.init_module():
        module = Pretrained(folder) if folder else Recorded(DEPTH)
    layer = module.model.model.layers[0] if folder else module.layers[0]
    size = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    with most_bytes() as found:
        trainer.fit(module, oracle.loader(batches(1)))
    return max(found), kept.found, size


@pytest.mark.timeout(100)
def test_a_process_has_one_layer_whole_at_a_time(tmp_path: Path) -> None:
    save_llama(tmp_path, DEPTH)
    for of_process in run_trainers(peaks, 2, folder=str(tmp_path), timeout=80):
        for most, kept, layer in of_process:
            assert kept > DEPTH * layer / 2
            assert most <= kept + layer
