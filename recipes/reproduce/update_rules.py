"""What schedules do to the weights: the update rules of the papers in one process, and the engine beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.schedules import Family, PipeDream, PipeDream2BW
from recipes.reproduce.results import Result, Row
from tests.support.thread_runs import stepping, trained

WIDTH, ROWS, RATE, MOMENTUM = 6, 8, 0.1, 0.9
Batches = Sequence[Tensor]
Version = Callable[[int, int], int]
"""``version(stage, t)``: the steps that the stage's weights have seen that batch ``t`` runs on."""


class _Layer(nn.Linear):
    """One layer, which is not divided."""

    def forward(self, x: Tensor) -> Tensor:
        """Values between -1 and 1."""
        return super().forward(x).tanh()


def network(layers: int) -> nn.Sequential:
    """Layers in double precision, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(_Layer(WIDTH, WIDTH) for _ in range(layers))).double()


def data(number: int) -> list[Tensor]:
    """Batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(number)]


def loss_of(net: nn.Module, part: Tensor) -> Tensor:
    """A mean over samples."""
    return F.mse_loss(net(part), part.sin())


def rule(batches: Batches, stages: int, version: Version, momentum: float) -> list[Tensor]:
    """The weights after all batches in one process: ``W(t+1) = W(t) - rate * gradient at version(stage, t)``."""
    newest, worker = network(stages), network(stages)
    optimizer = torch.optim.SGD(newest.parameters(), RATE, momentum)
    history = [[[p.detach().clone() for p in stage.parameters()]] for stage in newest]
    for t, batch in enumerate(batches):
        with torch.no_grad():
            for number, stage in enumerate(worker):
                for own, old in zip(stage.parameters(), history[number][version(number, t)], strict=True):
                    own.copy_(old)
        worker.zero_grad()
        loss_of(worker, batch).backward()  # type: ignore[no-untyped-call]
        for own, used in zip(newest.parameters(), worker.parameters(), strict=True):
            own.grad = used.grad
        optimizer.step()
        for number, stage in enumerate(newest):
            history[number].append([p.detach().clone() for p in stage.parameters()])
    return [p.detach().clone() for p in newest.parameters()]


def engine(
    batches: Batches, ranks: int, family: Family, micro_batches: int, momentum: float
) -> tuple[list[Tensor], list[int]]:
    """The weights after all batches through the engine, and the most versions that each rank has held."""
    parts = [batch.tensor_split(micro_batches) for batch in batches]
    sgd = lambda net: stepping(torch.optim.SGD(net.parameters(), RATE, momentum))  # noqa: E731
    _, net, held = trained(network(ranks * family.stages_per_rank), parts, ranks, family, loss_of, sgd)
    return [parameter.detach() for parameter in net.parameters()], held


def farthest(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of two weights."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def rules(ranks: int, batches: int, tolerance: str) -> Result:
    """PipeDream, PipeDream with vertical sync, 2BW, and every schedule with a flush.

    Args:
        ranks: stages.
        batches: training steps.
        tolerance: of the weights' largest difference, in double precision.
    """
    given, last, near = data(batches), ranks - 1, tolerance
    cases: list[tuple[str, Family, int, Version, list[int]]] = [
        (
            "PipeDream: w(t+1) = w(t) - r grad(w_1(t-n+1), …, w_n(t))",
            PipeDream(),
            1,
            lambda s, t: max(0, t - (last - s)),
            list(range(ranks, 0, -1)),
        ),
        (
            "PipeDream with vertical sync: w(t+1) = w(t) - r grad(w(t-n+1))",
            PipeDream(vertical_sync=True),
            1,
            lambda s, t: max(0, t - last),
            [],
        ),
        (
            "2BW: W(t+1) = W(t) - r grad(W(t-1))",
            PipeDream2BW(ranks),
            ranks,
            lambda s, t: max(0, t - 1),
            [2] * ranks,
        ),
    ]
    rows = []
    for what, family, micro_batches, version, versions in cases:
        for momentum in (0.0, MOMENTUM):
            found, held = engine(given, ranks, family, micro_batches, momentum)
            far = farthest(found, rule(given, ranks, version, momentum))
            told = f"{what}, momentum {momentum}: largest difference of a weight"
            rows.append(Row(told, 0.0, far, near))
            if versions and not momentum:
                note = "by rank, the first first"
                rows.append(
                    Row(f"{what.split(':')[0]}: versions held", tuple(versions), tuple(held), "exact", note=note)
                )
    plain = rule(given, ranks, lambda s, t: t, MOMENTUM)
    for name in schedules.names():
        family = schedules.get(name)
        if family.synchronous:
            stages = ranks * family.stages_per_rank
            expected = plain if stages == ranks else rule(given, stages, lambda s, t: t, MOMENTUM)
            far = farthest(engine(given, ranks, family, 2 * ranks, MOMENTUM)[0], expected)
            rows.append(Row(f"{name}: W(t+1) = W(t) - r grad(W(t)): largest difference of a weight", 0.0, far, near))
    return Result.of(rows)


def batch_norm(samples: int, micro_batches: Sequence[int], tolerance: str) -> Result:
    """Running statistics of micro-batches are those of the whole mini-batch: GPipe, section 2.3.

    Args:
        samples: of a mini-batch.
        micro_batches: numbers of them, even and uneven.
        tolerance: of the largest difference, in double precision.
    """
    rows = []
    for number in micro_batches:
        whole = _norms()
        batch = torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        whole[0](batch)
        found = _after_a_batch(batch, number)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            far = farthest([getattr(found[0], name)], [getattr(whole[0], name)])
            what = f"{name}, {samples} samples in {number} micro-batches, beside the whole batch"
            rows.append(Row(what, 0.0, far, tolerance))
    plain = _norms()
    for part in batch.tensor_split(number):
        plain[0](part)
    far = farthest([plain[0].running_var], [whole[0].running_var])  # type: ignore[list-item]
    rows.append(Row("running_var without it, beside the whole batch", None, far, note="updated by every micro-batch"))
    return Result.of(rows)


def _norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)).double()


def _after_a_batch(batch: Tensor, number: int) -> nn.Sequential:
    """On two ranks, with recomputation, which must not count twice."""
    parts, options = [batch.tensor_split(number)], {"recompute": "always", "deferred_batch_norm": True}
    loss = lambda net, part: net(part).square().mean()  # noqa: E731
    net: nn.Sequential
    _, net, _ = trained(_norms(), parts, 2, schedules.get("gpipe"), loss, lambda net: net.zero_grad, **options)
    return net
