"""Parameters whose values other ranks have."""

from __future__ import annotations

import copy
import io
import re
import weakref
from collections.abc import Callable

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor, exchange, is_absent
from tests.support import processes
from tests.support.pairs import slow_but
from tests.support.trainer_runs import QUIET


@pytest.fixture
def linear() -> nn.Linear:
    """A module whose weight is elsewhere and whose bias is here."""
    module = nn.Linear(3, 4)
    torch.utils.swap_tensors(module.weight, AbsentTensor.like(module.weight))
    return module


def test_looks_like_the_parameter(linear: nn.Linear) -> None:
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == (torch.Size([4, 3]), torch.float32, "cpu")
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None


def test_a_reference_of_a_run_that_is_over_does_not_matter() -> None:
    weight = nn.Parameter(torch.ones(2))
    run: list[object] = [weakref.ref(weight)]
    run.append(run)
    del run
    exchange(weight, AbsentTensor.like(weight))
    assert is_absent(weight)


def test_takes_no_memory() -> None:
    absent = AbsentTensor.like(nn.Parameter(torch.empty(1000, 1000)))
    assert absent.untyped_storage().nbytes() == 4


def test_follows_the_module(linear: nn.Linear) -> None:
    assert isinstance(linear.double().weight, AbsentTensor)
    assert linear.weight.dtype is torch.float64
    assert isinstance(copy.deepcopy(linear).weight, AbsentTensor)
    one, other = copy.deepcopy([linear.weight, linear.weight])
    assert one is other, "tied parameters stay tied"
    assert isinstance(linear.state_dict()["weight"], AbsentTensor)
    linear.load_state_dict({"weight": torch.ones(4, 3), "bias": torch.ones(4)})
    assert isinstance(linear.weight, AbsentTensor)


def test_changes_in_place_do_nothing(linear: nn.Linear) -> None:
    for parameter in linear.parameters():
        parameter.data.clamp_(0.0, 0.1)
        parameter.data.copy_(torch.ones_like(parameter))
    assert torch.equal(linear.bias, torch.ones(4))
    assert isinstance(linear.weight, AbsentTensor)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        nn.init.uniform_,
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        lambda weight: nn.init.sparse_(weight, 0.3),
        lambda weight: weight.data.normal_(0.0, 0.1),
        lambda weight: weight.add_(torch.randn_like(weight)),
        lambda weight: weight.copy_(torch.empty_like(weight).exponential_()),
        lambda weight: weight.mul_(torch.bernoulli(torch.full_like(weight, 0.5))),
        nn.init.eye_,
    ],
)
def test_random_changes_draw_what_the_true_one_draws(
    linear: nn.Linear, change: Callable[[nn.Parameter], object]
) -> None:
    drawn = []
    for weight in (linear.weight, nn.Parameter(torch.zeros(4, 3))):
        torch.manual_seed(5)
        change(weight)
        drawn.append(torch.rand(2).tolist())
    assert drawn[0] == drawn[1], "or layers of two stages get the same numbers"
    assert isinstance(linear.weight, AbsentTensor)


def test_values_are_never_numbers(linear: nn.Linear) -> None:
    for value in (
        (linear.weight**2).sum(),
        sum(parameter.pow(2).sum() for parameter in linear.parameters()),
        torch.zeros(4, 3).copy_(linear.weight.data),
        torch.zeros(4, 3).copy_(0.9 * torch.ones(4, 3) + 0.1 * linear.weight),
        torch._foreach_norm([linear.weight.detach(), linear.bias])[0],
    ):
        assert isinstance(value, AbsentTensor)
        assert not isinstance(value, nn.Parameter)
        with pytest.raises(CutError, match="only another stage has"):
            value.sum().item()


def test_cannot_be_saved(linear: nn.Linear) -> None:
    assert isinstance(copy.copy(linear.weight), AbsentTensor)
    for unsaved in (linear.state_dict(), linear):
        with pytest.raises(
            CutError,
            match=r"\(4, 3\) torch.float32 cannot be pickled or saved: another rank(.|\n)* pipeline.state_dict",
        ):
            torch.save(unsaved, io.BytesIO())


def test_what_is_changed_by_it_is_never_a_stale_number(linear: nn.Linear) -> None:
    for change in (
        lambda average, weight: average.mul_(0.9).add_(weight, alpha=0.1),
        lambda average, weight: average.lerp_(weight.detach(), 0.1),
        lambda average, weight: average.__isub__(0.1 * (average - weight.data)),
        lambda average, weight: torch._foreach_add_([average], [weight]),
        lambda average, weight: torch.add(average, weight, out=average),
    ):
        average = torch.zeros(4, 3)
        change(average, linear.weight.detach())
        assert isinstance(average, AbsentTensor)


def test_what_it_is_written_into_is_never_a_stale_number(linear: nn.Linear) -> None:
    result = torch.zeros(4, 3)
    assert torch.mul(linear.weight, 2.0, out=result) is result
    assert is_absent(result)


def test_norms_and_copies_of_it_have_its_shape(linear: nn.Linear) -> None:
    weight = linear.weight.detach()
    mean, variance = torch.zeros(3), torch.ones(3)
    found = [weight.clone(), weight.data, weight.contiguous(), weight.double(), linear.weight.cpu()]
    found.append(nn.functional.batch_norm(weight, None, None, training=True))
    assert all(is_absent(each) and each.shape == (4, 3) for each in found)
    assert found[3].dtype is torch.float64
    nn.functional.batch_norm(weight, mean, variance, training=True)
    assert is_absent(mean)
    assert is_absent(variance)


def test_memory_that_others_have_is_not_left_with_a_stale_number(linear: nn.Linear) -> None:
    average = torch.zeros(4, 3)
    with pytest.raises(CutError, match="shares its memory with others"):
        average.data.mul_(0.9).add_(linear.weight.data)


@torch.no_grad()
def test_torch_asks_nobody_when_data_is_assigned(linear: nn.Linear) -> None:
    teacher = nn.Linear(3, 4)
    assert not is_absent(teacher.weight)
    teacher.weight.data = teacher.weight.data * 0.9 + linear.weight.data * 0.1
    assert is_absent(teacher.weight)
    assert not is_absent(teacher.bias)


def test_lists_are_worked_on_without_it(linear: nn.Linear) -> None:
    averages = [torch.zeros(4, 3), torch.zeros(4)]
    torch._foreach_lerp_(averages, [linear.weight.detach(), torch.ones(4)], 0.5)
    assert isinstance(averages[0], AbsentTensor)
    assert torch.equal(averages[1], torch.full((4,), 0.5))


def test_averaged_models_and_optimizers_pass_by(linear: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(linear.parameters())
    average = torch.optim.swa_utils.AveragedModel(linear)
    linear.bias.grad = torch.ones(4)
    optimizer.step()
    average.update_parameters(linear)
    average.update_parameters(linear)
    assert torch.equal(average.module.bias, linear.bias)


def test_can_become_the_parameter_again(linear: nn.Linear) -> None:
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.ones(4, 3)))
    assert type(linear.weight) is nn.Parameter
    assert optimizer.param_groups[0]["params"][0] is linear.weight
    assert linear.weight.sum().item() == 12


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ReadsAfter(L.LightningModule):
    """Computes with a buffer of the first layer behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(_Scaled(), _Scaled())

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) * self.net[0].scale).mean()


class ReadsBefore(ReadsAfter):
    """Computes with a buffer of the last layer before the first one."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch * self.net[1].scale).mean()


class LogsIt(ReadsAfter):
    """Logs a buffer of the first layer."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)
        self.log("scale", self.net[0].scale)


MODULES = {"'mul'": ReadsAfter, "'net.0'": ReadsBefore, "self.log('scale', …)": LogsIt}


def _validate(process: int, kind: type[ReadsAfter]) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="pipe", **QUIET)  # type: ignore[arg-type]
    trainer.validate(kind(), DataLoader(torch.ones(4, 4), batch_size=2), verbose=False)


@pytest.mark.parametrize("use", slow_but(MODULES, "'net.0'"))
def test_a_step_cannot_use_the_value_of_another_rank(use: str) -> None:
    with pytest.raises(CutError, match=re.escape(f"{use} needs a value that is not here")) as caught:
        processes.run_trainers(_validate, 2, timeout=60, kind=MODULES[use])
    assert "scale'" in str(caught.value)
    assert "register it in the LightningModule" in str(caught.value)
