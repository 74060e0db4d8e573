"""Plugins and callbacks of Lightning that do not go with a pipeline are refused by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch import callbacks, plugins

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.trainer.checks import check_module
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET, quiet


def refused(kind: type[Any]) -> Any:
    """A precision that is refused."""
    how = "by name: it belongs to another strategy, or changes layers"
    return pytest.param(kind, marks=pytest.mark.feature("Precision", kind.__name__, "refused", how))


@pytest.mark.parametrize(
    "kind",
    [
        refused(plugins.BitsandbytesPrecision),
        refused(plugins.DeepSpeedPrecision),
        refused(plugins.FSDPPrecision),
        refused(plugins.TransformerEnginePrecision),
        refused(plugins.XLAPrecision),
    ],
)
def test_precisions_of_other_strategies(kind: type[Any]) -> None:
    quiet()
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=PipeStrategy(stages=2), max_epochs=1, **QUIET)
    trainer.strategy._precision_plugin = object.__new__(kind)  # without the libraries that some of them need
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} does not work with a pipeline"):
        trainer.fit(Lit(), datamodule=Data())


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        pytest.param(
            callbacks.BatchSizeFinder(),
            "BatchSizeFinder tries sizes until memory runs out",
            marks=pytest.mark.feature(
                "Callbacks", "BatchSizeFinder", "refused", "on several ranks: memory runs out on one of them alone"
            ),
        ),
        pytest.param(
            callbacks.ModelPruning("l1_unstructured", amount=0.5),
            "ModelPruning computes masks",
            marks=pytest.mark.feature(
                "Callbacks", "ModelPruning", "refused", "on several ranks: masks need all weights, which no rank has"
            ),
        ),
    ],
)
def test_callbacks_that_need_the_whole_model_on_several_ranks(callback: L.Callback, message: str) -> None:
    quiet()
    options = {**QUIET, "callbacks": [callback]}
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=PipeStrategy(), max_epochs=1, **options)
    with pytest.raises(ConfigurationError, match=message):
        check_module(Lit(), trainer, fitting=True, ranks=2)
    check_module(Lit(), trainer, fitting=True, ranks=1)
