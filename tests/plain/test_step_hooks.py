"""Hooks that steps register on modules, and remove again or not, do what they do on one device."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.patches import replaced
from lightning_pipe.plain.step_traces import StepHooks, TracesOfBatch
from tests.support import oracle
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET


class Rank:
    """A rank with two layers, whose hooks say their names."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Identity(), nn.Identity())
        self.hooks = StepHooks(self.net)
        self.batch = TracesOfBatch(1)
        self.said: list[str] = []

    def run(self, names: str, *, complete: bool, remove: str = "") -> None:
        """A run of a step that registers hooks, those in capitals in front of the others, and removes some."""
        with (
            self.hooks.installed(),
            suppress(KeyboardInterrupt),
            self.hooks.noting(lambda hooks: self.batch.end_run(hooks, complete=complete)),
        ):
            handles = {
                name: self.net[0].register_forward_hook(
                    lambda *_, name=name: self.said.append(name), prepend=name.isupper(), always_call=True
                )
                for name in names
            }
            self.net(torch.ones(1))
            for name in remove if complete else "":
                handles[name].remove()
            if not complete:
                raise KeyboardInterrupt

    def says(self) -> str:
        """What the hooks say that are there."""
        self.said.clear()
        self.net(torch.ones(1))
        return "".join(self.said)


def test_hooks_of_runs_that_end_early_are_gone_and_those_that_stay_are_on_all_ranks() -> None:
    one, other = Rank(), Rank()
    for rank in (one, other):
        rank.net[0].register_forward_hook(lambda *_, rank=rank: rank.said.append("0"))
    one.run("abCd", complete=True, remove="bd")
    other.run("ab", complete=False)
    other.run("abCd", complete=False)  # of the next micro-batch
    assert (one.says(), other.says()) == ("C0a", "0")
    assert one.batch.left() == (0, 2)
    for _ in range(2):  # two ranks with a last stage tell
        other.batch.put_back(one.batch.left())
    one.batch.put_back((0,))  # a rank that has completed a run has them
    assert (one.says(), other.says()) == ("C0a", "C0a")
    always = one.net[0]._forward_hooks_always_called, other.net[0]._forward_hooks_always_called
    assert [len(each) for each in always] == [2, 2]


def test_what_a_layer_registers_is_its_own() -> None:
    rank = Rank()
    inside: Any = SimpleNamespace(surroundings=SimpleNamespace(inside=True))
    with replaced(under_way, "run", inside, gated=False):
        rank.run("a", complete=False)
    assert rank.says() == "a"


def test_a_hook_that_a_rank_has_not_come_to_raises() -> None:
    rank = Rank()
    rank.run("a", complete=False)
    with pytest.raises(CutError, match="registers a hook on a module behind a cut"):
        rank.batch.put_back((1,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))  # type: ignore[no-any-return]


class Looks(L.LightningModule):
    """Adds up what comes out of parts of layers: by hooks for each batch in validation, lasting ones in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(4, 1)
        self.ready, self.found = False, list[Tensor]()

    def register(self) -> list[Any]:
        keep = lambda *given: self.found.append(given[2].abs().mean())  # noqa: E731
        return [part.register_forward_hook(keep) for layer in self.layers for part in (layer.act, layer)]

    def loss(self, batch: Any) -> Tensor:
        self.found.clear()
        loss = F.mse_loss(self.head(self.layers(batch[0])), batch[1])
        assert len(self.found) == (16 if self.ready and not self.training else 8)
        return loss + torch.stack(self.found).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.ready:  # as models of Hugging Face do
            self.register()
            self.ready = True
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        handles = self.register()
        self.log("val", self.loss(batch))
        for handle in handles:
            handle.remove()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(process: int, devices: int | None, **options: Any) -> tuple[dict[str, float], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(12, 4, generator=generator), torch.randn(12, 1, generator=generator))
    strategy: Any = PipeStrategy(layers="layers", micro_batches=2, **options) if devices else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, max_epochs=2, **QUIET)
    module = Looks()
    trainer.validate(module, DataLoader(data, batch_size=4), verbose=False)
    before = oracle.numbers(trainer.callback_metrics)
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    return before | {"val after": float(trainer.callback_metrics["val"])}, oracle.state_of(module)


RUNS = [
    {"devices": 2},
    {"devices": 1, "stages": 2},
    {"devices": 1, "stages": 2, "recompute": "always"},
    {"devices": 2, "schedule": "interleaved"},
]


@pytest.mark.parametrize("run", slow_but(RUNS, *RUNS[:3]), ids=str)
def test_a_step_with_hooks_learns_what_one_device_does(run: dict[str, Any]) -> None:
    """Stages of one process have each other's hooks, until those are removed or runs of the step come again."""
    metrics, weights = fit(0, None)
    for found in run_trainers(fit, 2, timeout=60, **run) if run["devices"] > 1 else [fit(0, **run)]:
        assert found[0] == pytest.approx(metrics, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[1][name], value)
