"""Everything else that a run may have, with parameters in parts: each as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.support import oracle
from tests.support.oracle import Trace
from tests.support.processes import run_trainers
from tests.support.sharded_runs import Pair, Pairs, divide_pair
from tests.support.trainer_runs import QUIET, quiet
from tests.support.zoo.base import WIDTH
from tests.support.zoo.hugging_face import llama

LAYOUTS: dict[str, dict[str, Any]] = {
    "parameters": {"data_parallel_size": 2, "shard_optimizer": "parameters"},
    "tensor": {"tensor_parallel_size": 2, "parallelize": divide_pair},
}


class Weighted(Pairs):
    """A mean in which samples count differently."""

    def loss(self, batch: Any) -> Tensor:
        squares = (self(batch["x"]) - batch["y"]).square().flatten()
        return (batch["w"] * squares).sum() / batch["w"].sum()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"])


class Plain(Weighted):
    """An optimizer that does not enlarge the differences of small gradients, as Adam does."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Built(Weighted):
    """Layers that are there once ``configure_model`` has run."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.layers, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
            self.layers = nn.ModuleList([Pair() for _ in range(4)])


class Normalised(Weighted):
    """Batch norm in the layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = nn.BatchNorm1d(WIDTH)


class Pretrained(Weighted):
    """A model of Transformers from a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        del self.embed, self.layers, self.head
        self.folder, self.model = folder, None

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x.unsqueeze(1).repeat(1, 3, 2)).logits.mean(2)[:, -1:]


def scaler() -> MixedPrecision:
    """Its first step overflows, by far: half the loss on each of two replicas would not do so at every scale."""
    options: Any = {"init_scale": 2.0**24, "backoff_factor": 2.0**-14, "growth_interval": 2}
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))


@dataclass(frozen=True)
class Case:
    """One way to use a Trainer.

    Args:
        make: the module, from a folder.
        strategy: further arguments of the strategy.
        trainer: arguments of the Trainer.
        plugins: make plugins.
        dtype: of the module and its batches.
        layouts: with which it runs.
        tolerance: the largest difference from one device.
        copies: how often a training batch has each sample, so that each micro-batch has the statistics of the batch.
    """

    make: Callable[[Path], L.LightningModule] = lambda folder: Weighted()
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[Callable[[], Any], ...] = ()
    dtype: torch.dtype = torch.float64
    layouts: tuple[str, ...] = ("parameters", "tensor")
    tolerance: float = 1e-9
    copies: int = 1


_SINGLE: dict[str, Any] = {"dtype": torch.float32, "strategy": {"micro_batches": 1}}
_CLIPPED = {"gradient_clip_val": 0.3}
CASES = {
    "weighted": Case(
        strategy={"loss_weight": lambda batch: batch["w"].sum(), "recompute": "except_last", "micro_batches": 3},
        trainer={"accumulate_grad_batches": 2, **_CLIPPED},
    ),
    "divided_backward_passes": Case(
        strategy={"schedule": "zero_bubble", "loss_weight": lambda batch: batch["w"].sum()},
        trainer=_CLIPPED,
        layouts=("tensor",),
    ),
    "normalised": Case(lambda folder: Normalised(), {"micro_batches": 2}, copies=2),
    "built": Case(lambda folder: Built(), {"micro_batches": 1}, {"precision": "64-true"}),
    "pretrained": Case(Pretrained, {"micro_batches": 1, "parallelize": None}),
    # sums over replicas are exact here, those over tensor ranks are rounded to the eight bits of a bfloat16
    "bf16_mixed": Case(trainer={"precision": "bf16-mixed"}, layouts=("parameters",), tolerance=1e-5, **_SINGLE),
    "bf16_mixed_tensor": Case(
        lambda folder: Plain(), trainer={"precision": "bf16-mixed"}, layouts=("tensor",), tolerance=2**-7, **_SINGLE
    ),
    "bf16_true": Case(trainer={"precision": "bf16-true"}, layouts=("parameters",), tolerance=1e-5, **_SINGLE),
    "bf16_true_built": Case(
        lambda folder: Built(), trainer={"precision": "bf16-true"}, layouts=("parameters",), tolerance=1e-5, **_SINGLE
    ),
    "bf16_true_tensor": Case(
        lambda folder: Plain(), trainer={"precision": "bf16-true"}, layouts=("tensor",), tolerance=2**-6, **_SINGLE
    ),
    "scaled": Case(plugins=(scaler,), layouts=("parameters",), tolerance=1e-5, **_SINGLE),
    "scaled_tensor": Case(
        lambda folder: Plain(),
        plugins=(scaler,),
        trainer={"max_epochs": 2, **_CLIPPED},
        layouts=("tensor",),
        tolerance=2**-9,
        **_SINGLE,
    ),
}


FAST = [
    ("weighted", "parameters"),
    ("normalised", "parameters"),
    ("bf16_mixed_tensor", "tensor"),
    ("scaled", "parameters"),
]
"""Each way to use a Trainer once; test_without_memory has models that are read from files."""


class Scales(L.Callback):
    """Notes the scale of the loss after each batch: it falls where all ranks have found an overflow."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        plugin: Any = trainer.precision_plugin
        self.found.append(plugin.scaler.get_scale() if getattr(plugin, "scaler", None) else 1.0)


def batches(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Three of them, the second is shorter."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"x": (WIDTH,), "y": (1,), "w": ()}
    return [
        {
            name: torch.rand(rows, *shape, generator=draw, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()
        }
        for rows in (8, 5, 8)
    ]


def fit(case: Case, folder: str, strategy: Any, devices: int, copies: int, loops: bool) -> Trace:
    """What training with validation leaves; all replicas have the same batches, each in copies.

    ``loops``: also what test and prediction give.
    """
    quiet()
    L.seed_everything(7, verbose=False)
    module = case.make(Path(folder))
    if "precision" not in case.trainer:
        module = module.to(case.dtype)
    recorder, scales, own = oracle.Recorder(), Scales(), batches(case.dtype)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=[recorder, scales],
        plugins=[make() for make in case.plugins] or None,
        **{"max_epochs": 1, **QUIET, **case.trainer},
    )
    training = [{name: torch.cat([value] * copies) for name, value in batch.items()} for batch in own]
    trainer.fit(module, oracle.loader(training), oracle.loader(own[:2]))
    trace = recorder.trace
    trace.weights = oracle.state_of(module)
    trace.metrics = oracle.numbers(
        {**trainer.callback_metrics, **{f"scale {n}": s for n, s in enumerate(scales.found)}}
    )
    if not loops:
        return trace
    trace.metrics |= oracle.numbers(trainer.test(module, oracle.loader(own[1:3]), verbose=False)[0])
    predicted: Any = trainer.predict(module, oracle.loader(own[1:3]))
    trace.weights["predicted"] = torch.cat(predicted)
    return trace


def has_loops(name: str, ranks: int) -> bool:
    """Whether a case has a test and a prediction: among the fast ones two have, which no precision rounds."""
    return ranks > 1 or name in ("weighted", "normalised")


def fit_all(process: int, folder: str, cases: list[tuple[str, str]], ranks: int) -> list[Trace]:
    """Each case with its layout, in two stages on so many ranks of a pipeline."""
    from lightning_pipe import PipeStrategy

    found = []
    for name, layout in cases:
        case = CASES[name]
        options = {**LAYOUTS[layout], **case.strategy}
        if layout != "tensor":
            options.pop("parallelize", None)
        strategy = PipeStrategy(pipeline_parallel_size=ranks, stages=2, **options)
        try:
            found.append(fit(case, folder, strategy, 2 * ranks, case.copies, has_loops(name, ranks)))
        except BaseException as error:
            error.add_note(f"{name}, {layout}")
            raise
    return found


def check(cases: list[tuple[str, str]], folder: str, ranks: int) -> list[Trace]:
    """What the first process finds, where all processes find what one device does."""
    torch.manual_seed(3)
    llama().model.double().save_pretrained(folder)
    found = run_trainers(fit_all, 2 * ranks, folder=folder, cases=cases, ranks=ranks, timeout=380)
    wrong: list[str] = []
    for (name, layout), *traces in zip(cases, *found, strict=True):
        case = CASES[name]
        # running variances tell how many samples there were: those of all replicas
        replicas = LAYOUTS[layout].get("data_parallel_size", 1) if case.copies > 1 else 1
        truth = fit(case, folder, "auto", 1, case.copies * replicas, has_loops(name, ranks))
        for process, trace in enumerate(traces):
            differ = oracle.differences(trace, truth, case.tolerance)
            wrong += [f"{name}, {layout}, process {process}: {line}" for line in differ]
    assert not wrong, "\n  ".join(wrong[:30])
    return found[0]


@pytest.mark.timeout(300)
def test_each_as_on_one_device(tmp_path: Path) -> None:
    scaled = check(FAST, str(tmp_path), ranks=1)[FAST.index(("scaled", "parameters"))]
    scales = [value for name, value in scaled.metrics.items() if name.startswith("scale ")]
    assert scales[0] < 2.0**24, "the first step did not overflow"
    assert any(later > earlier for earlier, later in pairwise(scales)), "no step was made"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_over_ranks_and_with_the_other_layouts(tmp_path: Path) -> None:
    check([(name, layout) for name, case in CASES.items() for layout in case.layouts], str(tmp_path), ranks=2)
