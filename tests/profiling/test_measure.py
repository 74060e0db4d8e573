"""Measuring: layers that sleep, in this process and in several."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipe
from lightning_pipe.cli import main
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.cost_profile import CostProfile
from lightning_pipe.profiling import command, processes
from lightning_pipe.profiling.measure import first, measure_profile, run_conditions
from lightning_pipe.transport.topology import Topology
from tests.profiling import rehearsed
from tests.profiling.sleeping import batch, sleepers
from tests.support.fake_cuda.call import rehearse
from tests.support.pairs import slow_but
from tests.support.processes import forkserver
from tests.support.threads import run_threads, thread_world


def test_layers_are_measured_by_size() -> None:
    found = lightning_pipe.profile(sleepers(), batch(), micro_batch_sizes=[1, 2], rounds=1)
    for size, costs in found.sizes.items():
        for layer, slow in enumerate((1, 2, 1)):
            # a sleep is never shorter than asked for; the upper limit is for a busy machine
            assert 0.009 * size * slow <= costs.forward[layer] + costs.stage_forward < 0.05 * size * slow + 0.05
            assert 0.018 * size * slow <= costs.backward[layer] + costs.stage_backward < 0.1 * size * slow + 0.05
        assert costs.boundary_bytes == (32.0 * size, 32.0 * size, 0.0)
        assert all(saved >= 32 * size for saved in costs.saved_bytes)
    assert [(layer.name, layer.parameters) for layer in found.layers] == [("0", 1), ("1", 1), ("2", 1)]
    assert found.conditions["threads"] == str(torch.get_num_threads())
    found.check(run_conditions(torch.device("cpu")))


def test_what_is_kept_is_what_autograd_keeps() -> None:
    """Neither twice, as the result of one layer and the input of the next, nor without what the step does itself."""
    net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())))
    batch = torch.randn(4, 16, requires_grad=True)

    def step(module: nn.Module, part: Tensor) -> Tensor:
        return functional.cross_entropy(module(part), torch.zeros(len(part), dtype=torch.long))

    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step(net, batch)
    costs = lightning_pipe.profile(net, batch, micro_batch_sizes=[4], rounds=1, step=step).sizes[4]
    row = 4 * 16 * 4
    assert sum(costs.saved_bytes) == sum(kept.values())
    assert costs.saved_bytes[:5] == (row, row, 0, row, 0)
    assert costs.saved_bytes[5] > 2 * row  # with the logarithms of the loss
    loss.backward()


def test_ranks_measure_messages_together() -> None:
    net = sleepers(0.001)
    options = {"micro_batch_sizes": [1], "rounds": 1}
    found = run_threads(thread_world(Topology(2)), lambda each: measure_profile(each, net, batch(), **options))
    assert found[0] == found[1]
    assert found[0].message.alpha >= 0  # the engine's part is taken off, on a busy machine all of it
    assert found[0].all_reduce.alpha > 0
    assert found[0].conditions["ranks"] == "2"


def test_the_module_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    lightning_pipe.profile(net, torch.randn(4, 4), micro_batch_sizes=[2], rounds=1)
    assert all(bool((before[name] == value).all()) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_micro_batches_are_cut_along_the_samples() -> None:
    whole = {"x": torch.arange(6).reshape(3, 2), "names": ["a", "b", "c"], "flag": True}
    part = first(whole, 2)
    assert part["x"].tolist() == [[0, 1], [2, 3]]
    assert part["x"].untyped_storage().nbytes() == part["x"].nbytes, "of the rest nothing is kept"
    assert (part["names"], part["flag"]) == (["a", "b"], True)
    with pytest.raises(ConfigurationError, match=r"\[8\] cannot be measured with a batch of 3 samples"):
        lightning_pipe.profile(sleepers(), whole, micro_batch_sizes=[8])
    with pytest.raises(ConfigurationError, match=r"not clear\. Lengths found: no tensors"):
        lightning_pipe.profile(sleepers(), {"flag": True})


def test_what_cannot_be_sent_to_processes_is_refused() -> None:
    net = sleepers()
    net.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="cannot be sent to other processes"):
        lightning_pipe.profile(net, batch(), ranks=2)


@pytest.mark.timeout(120)
def test_from_the_command_line_to_a_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes measure, here forked; the file is planned with, and refused for another module."""
    monkeypatch.setattr(processes, "get_context", lambda _: forkserver())
    path, place = tmp_path / "sleepers.json", "tests.profiling.sleeping:sleepers"
    options = ["--batch", "tests.profiling.sleeping:batch", "--sizes", "[1]", "--rounds", "1", "--timeout", "100"]
    main(["profile", place, "--arguments.seconds", "0.001", "--ranks", "2", *options, "--output", str(path)])
    assert f"measured 3 layers of Sequential on micro-batches of 1 samples: {path}" in capsys.readouterr().out
    message = CostProfile.load(path).message
    assert message.alpha > 0 or message.beta > 0  # on a busy machine the fit through few points may have one of them
    main(["search", place, "--profile", str(path), "--ranks", "2", "--global-batch", "8", "--memory", "1MB"])
    assert "chosen:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["search", "torch.nn:Sequential", "--profile", str(path), "--ranks", "2"])
    assert "error" in capsys.readouterr().err


class Described(lightning.LightningDataModule):
    """Knows its data once it is set up."""

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.ones(8, 8))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.data, batch_size=4)


class Logging(lightning.LightningModule):
    """Logs in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = sleepers(0.0001)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).sum()
        self.log("loss", loss)
        return loss


def test_a_data_module_gives_the_batch_and_logging_is_silent(
    recwarn: pytest.WarningsRecorder,
) -> None:
    batch = command._batch(Logging(), "tests.profiling.test_measure:Described")
    found = lightning_pipe.profile(Logging(), batch, micro_batch_sizes=[2], rounds=1)
    assert found.conditions["shapes"] == "(1, 8) float32"
    assert not recwarn.list
    with pytest.raises(ConfigurationError, match="Logging has no train_dataloader that gives a batch"):
        command._batch(Logging(), None)
    with pytest.raises(ConfigurationError, match="Sequential has no train_dataloader"):
        command._batch(sleepers(), None)


def told(capsys: pytest.CaptureFixture[str], *more: str, made: str = "sleepers") -> str:
    """What the command says when it cannot measure."""
    words = [f"tests.profiling.sleeping:{made}", "--batch", "tests.profiling.sleeping:batch", "--timeout", "60"]
    with pytest.raises(SystemExit):
        main(["profile", *words, *more])
    return capsys.readouterr().err.strip()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_processes_say_what_failed_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    error = told(capsys, "--sizes", "[9]")
    assert "micro_batch_sizes=[9] cannot be measured with a batch of 4 samples" in error
    assert "Traceback" not in error
    error = told(capsys, "--sizes", "[1]", made="broken")
    assert "A process that measured failed with RuntimeError: mat1 and mat2 shapes cannot be multiplied" in error
    assert "linear.py, line" in error
    assert "Traceback" not in error


def test_what_cannot_be_begun_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not ranks=0" in told(capsys, "--ranks", "0")
    if not torch.cuda.is_available():
        assert "A GPU for each of 1 rank is needed, and this machine has 0" in told(capsys, "--device", "cuda")
    with pytest.raises(ConfigurationError, match="not rounds=0"):
        lightning_pipe.profile(sleepers(), batch(), rounds=0)


@pytest.mark.rehearsed
@pytest.mark.parametrize("ranks", slow_but([1, 2], 1))
def test_work_of_a_device_is_measured_not_its_launches(ranks: int) -> None:
    found = rehearse(rehearsed.profile_on, ranks)
    costs = found.sizes[2]
    assert all(each + costs.stage_forward >= 0.9 * rehearsed.SECONDS for each in costs.forward)
    if ranks == 2:
        assert found.conditions["transport"] == "NcclTransport"
        assert found.message.alpha > 0 or found.message.beta > 0
