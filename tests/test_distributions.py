"""``lightning`` and ``pytorch_lightning``: Trainers of both take the strategy, and train as on one device.

`tests/trainer/test_interactive.py` has sessions with one of the packages alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipe
from lightning_pipe.distributions import home, install, maker, of_maker
from lightning_pipe.errors import ConfigurationError
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="`make` sets up an environment with it")
SECOND = "lightning_pipe.pytorch_lightning"


def lit(package: ModuleType) -> Any:
    class Lit(package.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.model(batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", self.model(batch[0]).pow(2).mean())

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            out: Tensor = self.model(batch[0])
            return out

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    torch.manual_seed(1)
    return Lit().double()


def train(process: int, folder: Path, name: str, strategy: str, devices: int) -> dict[str, Any]:
    """Fit, save, load and predict with one of the packages, in a process that has imported both."""
    quiet()
    package = import_module(name)
    chosen: Any = lightning_pipe.PipeStrategy(micro_batches=2) if strategy == "object" else strategy
    if strategy == "other":
        base = SECOND if name == "lightning" else "lightning_pipe"
        chosen = import_module(f"{base}.trainer.strategy").PipeStrategy(micro_batches=2)
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).double()
    loader = DataLoader(TensorDataset(rows), batch_size=4)

    def trainer(**options: Any) -> Any:
        return package.Trainer(accelerator="cpu", devices=devices, strategy=chosen, **options, **QUIET)

    fits = trainer(max_epochs=1)
    module = lit(package)
    fits.fit(module, loader, loader)
    fits.save_checkpoint(folder / f"{name}-{devices}.ckpt")
    values = {name: float(value) for name, value in fits.callback_metrics.items()}
    predicted = torch.cat(fits.predict(module, loader))
    ours = type(fits.strategy).__module__
    assert devices == 1 or (fits.strategy is chosen) == (not isinstance(chosen, str))
    assert devices == 1 or ours.startswith(SECOND) == (name == "pytorch_lightning")
    return {"values": values, "predicted": predicted, "weights": dict(module.state_dict())}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("pytorch_lightning", "pipe"),
        pytest.param("pytorch_lightning", "object", marks=pytest.mark.slow),
        pytest.param("pytorch_lightning", "other", marks=pytest.mark.slow),
        ("lightning", "other"),
    ],
)
def test_trains_as_on_one_device(name: str, strategy: str, tmp_path: Path) -> None:
    expected = train(0, folder=tmp_path, name=name, strategy="auto", devices=1)
    for found in run_trainers(train, 2, timeout=60, folder=tmp_path, name=name, strategy=strategy, devices=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    one, two = (torch.load(tmp_path / f"{name}-{size}.ckpt", weights_only=True)["state_dict"] for size in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-13)


def test_a_callback_of_the_other_package_is_the_error() -> None:
    quiet()
    for package, other in ((lightning, pytorch_lightning), (pytorch_lightning, lightning)):
        callbacks = [other.Callback()]
        trainer = package.Trainer(accelerator="cpu", devices=1, strategy="pipe", callbacks=callbacks, **QUIET)
        with pytest.raises(ConfigurationError, match=f"Callback is one of {other.__name__}, and the Trainer of"):
            trainer.fit(lit(package), DataLoader(torch.ones(2, 4)))


def test_a_module_of_the_other_package_is_the_error() -> None:
    quiet()
    trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=1, strategy="pipe", **QUIET)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        trainer.fit(lit(lightning), DataLoader(torch.ones(2, 4)))


def test_a_class_is_found_for_each_package() -> None:
    first, second = (import_module(f"{base}.trainer.strategy").PipeStrategy for base in ("lightning_pipe", SECOND))
    assert first is lightning_pipe.PipeStrategy
    assert first is not second
    for kind in (first, second):
        assert of_maker(kind, lightning.Callback()) is first
        assert of_maker(kind, pytorch_lightning.Callback()) is second
    assert maker(nn.Linear(1, 1)) is None
    assert home("lightning_pipe.callbacks") == "lightning_pipe.callbacks"
    install()
    assert sum(type(finder).__module__ == "lightning_pipe.distributions" for finder in sys.meta_path) == 1


def test_a_strategy_of_ones_own_derives_from_that_of_the_trainer() -> None:
    first, second = (import_module(f"{base}.trainer.strategy").PipeStrategy for base in ("lightning_pipe", SECOND))
    own: Any = type("Own", (first,), {"__module__": __name__})
    assert type(lightning.Trainer(accelerator="cpu", strategy=own(), **QUIET).strategy) is own
    with pytest.raises(ConfigurationError, match=r"Own derives.*\n?.*pytorch_lightning\.trainer\.strategy"):
        pytorch_lightning.Trainer(accelerator="cpu", strategy=own(), **QUIET)
    other: Any = type("Own", (second,), {"__module__": __name__})
    assert type(pytorch_lightning.Trainer(accelerator="cpu", strategy=other(), **QUIET).strategy) is other


def test_modules_that_are_not_there() -> None:
    for name in ("trainer.nonsense", "nonsense"):
        with pytest.raises(ModuleNotFoundError):
            import_module(f"{SECOND}.{name}")
