"""The one word on modules of every shape: nobody says where their layers are."""

from __future__ import annotations

import functools
import io
import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError, PartitionError, PipeError
from lightning_pipe.partition import divide, find_layers, imbalance
from lightning_pipe.partition.calls import recorded, work_of
from tests.support import oracle, processes
from tests.support.any_modules import DEPENDENT, MODULES
from tests.support.pairs import asked, slow_but
from tests.support.trainer_runs import QUIET, quiet

WORD = "pipe"


def fit(name: str, strategy: str, devices: int) -> dict[str, Any]:
    """What an epoch with validation leaves, and a prediction."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder, printed = MODULES[name]().double(), oracle.Recorder(), io.StringIO()
    options = {**QUIET, "max_epochs": 1, "limit_val_batches": 1, "limit_predict_batches": 1}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, callbacks=[recorder], **options)
    with redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, module.data(), module.data())
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(module, module.data())
    return {
        "losses": recorder.trace.losses,
        "weights": oracle.state_of(module),
        "metrics": metrics,
        "predicted": predicted,
        "printed": printed.getvalue(),
        "warnings": [str(each.message) for each in caught if "run whole" in str(each.message)],
    }


def fits(process: int, names: list[str], strategy: str, devices: int) -> list[Any]:
    """Several trainings in one world; what went wrong in the place of what they leave."""
    return [fit(name, strategy, devices) for name in names]


def assert_equal(name: str, found: dict[str, Any]) -> None:
    expected = fit(name, "auto", 1)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-9), name
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-9), name
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")
    for mine, own in zip(found["predicted"], expected["predicted"], strict=True):
        assert isinstance(mine, Tensor)
        torch.testing.assert_close(mine, own, rtol=1e-9, atol=1e-9)


WORDS = (WORD, "pipe_interleaved", "pipe_chimera", "pipe_zero_bubble", "pipe_gpipe")
FAST = {
    *("Flow", "HeadOfTask", "Packed", "Segmentation", "Translation"),
    *("Scaled", "NormalisedBehind", "HighestInside"),
}
"""Each finds its layers, or what crosses between them, in a way of its own; samples meet before, behind, in a layer.

"Backwards" trains on two ranks behind a prediction and from a checkpoint, "Siamese" by the line of its plan.
"""
OF_FOUR = ("Backwards", "Fusion", "LanguageModel", "Segmentation", "Translation", *DEPENDENT)
"""Those that have layers enough for four stages."""
TWO_PASSES = [("Siamese", word) for word in ("pipe_chimera", "pipe_zero_bubble")]
"""Two passes need whole backward passes and one pipe: an error says so."""


def cases() -> list[Any]:
    """Every module by every word on two ranks, and on four."""
    ways = [(2, word) for word in WORDS] + [(4, WORD)]
    found = []
    for (ranks, word), name in itertools.product(ways, MODULES):
        fast = (ranks, word) == (2, WORD) and name in FAST
        two_stages = ranks == 2 and word != "pipe_interleaved"
        if (name, word) not in TWO_PASSES and (two_stages or name in OF_FOUR):
            found.append(pytest.param(ranks, word, name, marks=() if fast else pytest.mark.slow))
    return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Callable[[int, str], Any]:
    """By module what process 0 has, from one world for each number of ranks and each word."""
    cases = asked(request, "ranks", "word", "name")

    @functools.cache
    def found(ranks: int, word: str) -> dict[str, dict[str, Any]]:
        names = [name for *way, name in cases if way == [ranks, word]]
        options = {"strategy": word, "devices": ranks}
        runs = processes.run_trainers(fits, ranks, timeout=60 + 10 * len(names), names=names, **options)
        return dict(zip(names, runs[0], strict=True))

    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "word", "name"), cases())
def test_trains_as_one_device(ranks: int, word: str, name: str, trained: Callable[[int, str], Any]) -> None:
    found = trained(ranks, word)[name]
    assert_equal(name, found)
    if name in DEPENDENT and word == WORD:
        printed = " ".join(found["printed"].split())
        assert "depends on which samples are together" in printed
        assert "So batches run whole" in printed
        assert len(found["warnings"]) == 1


# ------------------------------------------------------------------ when the layers are looked for, and what is said


def uncompared(**options: Any) -> Any:
    """A strategy that looks for layers, and not at losses."""
    from lightning_pipe import PipeStrategy

    return PipeStrategy(compare_losses=False, **options)


def backwards(strategy: Any = "auto", devices: int = 1, epochs: int = 1, **options: Any) -> tuple[L.Trainer, Any]:
    """A Trainer, and a module whose layers are called in another order than they are registered in."""
    quiet()
    L.seed_everything(7, verbose=False)
    options = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": epochs, **options}
    return L.Trainer(**options, **QUIET), MODULES["Backwards"]().double()


def predicted_first(process: int, devices: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """The first run of a module is no training."""
    trainer, module = backwards(uncompared() if devices > 1 else "auto", devices)
    with redirect_stdout(io.StringIO()):
        result = trainer.predict(module, module.data())
        trainer.fit(module, module.data())
    return [float(each.sum()) for each in result or ()], oracle.state_of(module)


def averaging(path: Any, epochs: int = 2, **options: Any) -> tuple[L.Trainer, dict[str, Tensor]]:
    """A training that goes on from a checkpoint: averages of weights and momentum with it."""
    averages = L.pytorch.callbacks.EMAWeightAveraging(decay=0.9)
    trainer, module = backwards(epochs=epochs, callbacks=[averages], **options)
    with redirect_stdout(io.StringIO()):
        trainer.fit(module, module.data(), ckpt_path=path)
    return trainer, oracle.state_of(module)


def resumed(process: int, path: str) -> dict[str, Tensor]:
    return averaging(path, strategy=uncompared(), devices=2)[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one device."""
    path = str(tmp_path_factory.mktemp("one") / "one.ckpt")
    averaging(None, epochs=1)[0].save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def ranks(checkpoint: str) -> dict[str, list[Any]]:
    """What two processes have, by test."""
    resumes = partial(resumed, path=checkpoint)
    calls = {"predicted": predicted_first, "resumed": resumes, "twice": fitted_twice, "parts": built_in_parts}
    return processes.in_turn(calls, 2)


def test_the_first_run_may_be_an_evaluation(ranks: dict[str, list[Any]]) -> None:
    found, weights = ranks["predicted"][0]
    expected, own = predicted_first(0, devices=1)
    assert found == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(weights, own, rtol=1e-9, atol=1e-9)


def test_a_resumed_fit_goes_on_with_its_optimizer_and_averages(checkpoint: str, ranks: dict[str, list[Any]]) -> None:
    torch.testing.assert_close(ranks["resumed"][0], averaging(checkpoint)[1], rtol=1e-9, atol=1e-9)


def one_process(name: str, stages: int = 2, **options: Any) -> tuple[list[float], str]:
    """The losses of a training with two stages on one process, and what it prints."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder, printed = MODULES[name]().double(), oracle.Recorder(), io.StringIO()
    strategy = uncompared(stages=stages, **options)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[recorder], **QUIET)
    with redirect_stdout(printed):
        trainer.fit(module, module.data())
    return recorder.trace.losses, " ".join(printed.getvalue().split())


def test_an_evaluation_behind_a_fit_has_its_layers() -> None:
    """Its own step calls two layers, for four stages."""
    strategy: Any = uncompared(stages=4)
    assert_equal("Fusion", fit("Fusion", strategy, 1))


def test_evaluations_look_no_second_time() -> None:
    runs: list[int] = []

    class Counted(MODULES["Backwards"]):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            runs.append(batch_idx)
            super().validation_step(batch, batch_idx)

    quiet()
    found, module = list[int](), Counted().double()
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=uncompared(stages=2), limit_val_batches=2, **QUIET)
    for _ in range(2):
        runs.clear()
        trainer.validate(module, module.data(), verbose=False)
        found.append(len(runs))
    assert found == [1 + 2 * 2, 2 * 2]  # each batch on two stages


def test_named_layers_in_another_order_are_told_so_and_the_remedies_work() -> None:
    expected, _ = one_process("Backwards")
    with pytest.raises(CutError, match=r"layer 'decoder.0' is called behind 'encoder.2', which follows it"):
        one_process("Backwards", layers=["decoder", "encoder", "out"])
    assert one_process("Backwards", layers=["encoder", "decoder", "out"])[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", slow_but(["Backwards", "Experts", "LanguageModel", "Siamese"], "Siamese"))
def test_the_line_of_the_plan_can_be_pasted(name: str) -> None:
    expected, printed = one_process(name)
    pasted = re.search(r"order of their calls: (layers=.*?, balance=\[[\d, ]+\](, passes=\d+)?)", printed)
    assert pasted is not None
    assert one_process(name, **eval(f"dict({pasted[1]})"))[0] == pytest.approx(expected, abs=1e-9)


def test_convolutions_are_balanced_by_their_work() -> None:
    """Most parameters are in the last blocks, and half as much work again would be in the first stage."""
    module = MODULES["ResidualSequence"]().double()
    layers = find_layers(module)
    with recorded(module) as calls:
        module(next(iter(module.data()))[0])
    by_parameters = divide(module, layers, 2, "parameters")
    assert imbalance(work_of(calls, [name for name, _ in layers]), by_parameters) > 1.5
    balanced = re.search(
        r"balanced by work: the largest stage costs ([\d.]+) x the mean", one_process("ResidualSequence")[1]
    )
    assert balanced is not None
    assert float(balanced[1]) < 1.2


def fitted_twice(process: int, devices: int = 2) -> list[float]:
    """The losses of two runs of one module, which stays divided between them."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder = MODULES["ResidualSequence"]().double(), oracle.Recorder()
    for _ in range(2):
        strategy = uncompared(layers="net", gather_limit=0) if devices > 1 else "auto"
        options = {**QUIET, "max_epochs": 1, "limit_train_batches": 2, "callbacks": [recorder]}
        trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
        with redirect_stdout(io.StringIO()):
            trainer.fit(module, module.data())
    return recorder.trace.losses


def test_a_run_goes_on_with_the_division_that_an_earlier_one_has_balanced_by_work(ranks: dict[str, list[Any]]) -> None:
    assert ranks["twice"][0] == pytest.approx(fitted_twice(0, devices=1), abs=1e-9)


class _Cells(MODULES["Recurrent"]):  # type: ignore[misc]
    """Cells one above the other, in a loop over time."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.cells = nn.ModuleList(nn.GRUCell(5 if number == 0 else 8, 8) for number in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(len(x), 8)] * 3
        for step in x.unbind(1):
            for number, cell in enumerate(self.cells):
                step = states[number] = cell(step, states[number])
        found: Tensor = self.out(states[-1])
        return found


def test_cells_in_a_loop_over_time_get_a_line_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "Cells", _Cells)
    with pytest.raises(PartitionError, match=r"The step comes back to its layers") as caught:
        one_process("Cells")
    assert caught.value.hint is not None
    pasted = caught.value.hint.split("with ")[1].rstrip(".").replace(" and ", ", ")
    assert pasted == "layers=['cells.*', 'out'], passes=6"
    found, _ = one_process("Cells", **eval(f"dict({pasted})"))
    assert found == pytest.approx(fit("Cells", "auto", 1)["losses"][: len(found)], abs=1e-9)


def test_a_step_that_comes_back_is_told_of_passes() -> None:
    with pytest.raises(CutError, match=r"is called a second time.*\n.*PipeStrategy\(passes=n\)"):
        one_process("Siamese", layers=["backbone", "projector"])
    expected, _ = one_process("Siamese")
    assert one_process("Siamese", layers=["backbone", "projector"], passes=2)[0] == pytest.approx(expected, abs=1e-9)


def test_schedules_without_passes_name_those_that_have_them() -> None:
    with pytest.raises(PartitionError, match=r"use schedule='1f1b', 'gpipe' or 'interleaved'"):
        one_process("Siamese", schedule="zero_bubble")


class _LeftOut(MODULES["Chain"]):  # type: ignore[misc]
    """Leaves layers out in its first batch, as chance may have it, and another one in the second."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.global_step if self.training else 2
        left = {0: ("fc3", "fc4"), 1: ("fc2",)}.get(step, ())
        x = torch.tanh(self.fc1(x))
        for name in ("fc2", "fc3", "fc4"):
            x = x if name in left else torch.tanh(getattr(self, name)(x))
        found: Tensor = self.out(x)
        return found


@pytest.mark.parametrize("stages", [2, 5])
def test_named_layers_may_be_left_out_of_a_run(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "LeftOut", _LeftOut)
    layers = ["fc1", "fc2", "fc3", "fc4", "out"]
    found, _ = one_process("LeftOut", stages, layers=layers)
    assert found == pytest.approx(fit("LeftOut", "auto", 1)["losses"][: len(found)], abs=1e-9)


def test_too_few_layers_tell_what_was_called() -> None:
    with pytest.raises(PartitionError, match=r"5 layers for 6 stages.*Called were: fc1, fc2, fc3, fc4, out"):
        one_process("Chain", stages=6)


class _Wide(MODULES["Backwards"]):  # type: ignore[misc]
    """With weights that are worth leaving out where another process makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.decoder = nn.Linear(128, 4), nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        self.encoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128))


def built_in_parts(process: int) -> tuple[str, float]:
    """The error of a module of which each process builds its own part, and its loss with layers that are named."""
    quiet()
    for layers in (None, ["encoder", "decoder", "out"]):
        L.seed_everything(7, verbose=False)
        strategy = uncompared(layers=layers)
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
        with trainer.init_module():
            module = _Wide()
        if layers is None:
            with pytest.raises(PipeError) as ended:
                trainer.fit(module.double(), module.data(), module.data())
    with redirect_stdout(io.StringIO()):
        trainer.fit(module.double(), module.data(), module.data())
    return str(ended.value), float(trainer.callback_metrics["val_loss"])


def test_a_module_that_nobody_has_whole_ends_where_it_calls_layers_in_another_order(
    ranks: dict[str, list[Any]],
) -> None:
    L.seed_everything(7, verbose=False)
    module = _Wide().double()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    trainer.fit(module, module.data(), module.data())
    for told, loss in ranks["parts"]:
        assert re.search(r"(?s)'decoder.0' is called behind 'encoder.2'.*in that order: layers=\[...\]", told)
        assert loss == pytest.approx(float(trainer.callback_metrics["val_loss"]), abs=1e-9)
