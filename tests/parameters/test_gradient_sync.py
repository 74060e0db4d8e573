"""Gradients are summed exactly, whoever has them and in whatever order the members start."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.parameters.gradient_sync import GradientSync
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.support.threads import ThreadTransport, run_threads, thread_world

WORLD = Topology(ranks=1, replicas=3)
EVERYONE = (0, 1, 2)


def gradient(parameter: Tensor, process: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + process)
    # Small integers: sums are exact in every dtype and order.
    return torch.randint(-8, 8, parameter.shape, generator=generator).to(parameter.dtype)


def make(dtypes: list[torch.dtype]) -> list[Parameter]:
    shapes = [(3, 4), (5,), (), (2, 3, 4), (100,), (7, 1), (0, 3)]
    return [Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)])) for i, shape in enumerate(shapes)]


def owner_of(parameter: Parameter) -> int:
    """Whoever: uneven parts, and no part for process 1."""
    return 0 if parameter.dim() > 1 else 2


def sums(transport: Transport, bucket_bytes: int, dtypes: list[torch.dtype], owned: bool) -> list[list[Any]]:
    """The gradients after each step; if parameters have owners, ``None`` in the place of what others get."""
    parameters = make(dtypes)
    reducer = GradientSync(transport, bucket_bytes)
    reducer.add(0, parameters, EVERYONE, owner_of if owned else None)
    found = []
    for step in range(3):
        for parameter in parameters:
            parameter.grad = gradient(parameter, transport.process, step)
        reducer.start(0)
        assert all(parameter.grad is None for parameter in parameters)
        reducer.finish()
        for p in parameters:
            assert p.grad is None or (p.grad.dtype == p.dtype and p.grad.stride() == p.stride())
        found.append([None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters])
    return found


def expected(dtypes: list[torch.dtype], owned: bool) -> list[list[list[Any]]]:
    """What each process has after each step."""
    steps = [[sum(gradient(p, process, step) for process in EVERYONE) for p in make(dtypes)] for step in range(3)]
    return [
        [[whole.tolist() if not owned or owner_of(whole) == process else None for whole in step] for step in steps]
        for process in EVERYONE
    ]


MIXED = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("owned", [False, True], ids=["everyone", "owners"])
@pytest.mark.parametrize("dtypes", [[torch.float64], MIXED], ids=["one dtype", "mixed"])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_sums_are_exact(bucket_bytes: int, dtypes: list[torch.dtype], owned: bool) -> None:
    results = run_threads(thread_world(WORLD), lambda transport: sums(transport, bucket_bytes, dtypes, owned))
    assert results == expected(dtypes, owned)


@pytest.mark.parametrize("owned", [False, True], ids=["everyone", "owners"])
def test_sums_are_exact_over_gloo(owned: bool) -> None:
    found = processes.run_pipeline(sums, WORLD, bucket_bytes=200, dtypes=MIXED, owned=owned)
    assert found == expected(MIXED, owned)


@pytest.mark.parametrize("owner", [None, lambda parameter: 0], ids=["everyone", "owners"])
def test_gradients_may_be_missing_on_some_members_or_on_all_and_parameters_frozen(owner: Any) -> None:
    def fn(transport: ThreadTransport) -> list[Any]:
        parameters = [Parameter(torch.zeros(2)) for _ in range(3)] + [Parameter(torch.zeros(2), requires_grad=False)]
        reducer = GradientSync(transport, bucket_bytes=12)
        reducer.add("tied", parameters, EVERYONE, owner)
        if transport.process == 1:
            parameters[0].grad = torch.ones(2)
        parameters[2].grad = torch.ones(2)
        reducer.finish()  # starts what was not started
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    first, *others = run_threads(thread_world(WORLD), fn)
    assert first == [[1.0, 1.0], None, [3.0, 3.0], None]
    assert others == [first if owner is None else [None] * 4] * 2


def test_members_may_start_in_different_orders() -> None:
    def fn(transport: ThreadTransport) -> list[float]:
        keys = [("stage", 0), ("stage", 1), ("stage", 10), ("owners", (0,)), ("owners", (0, 1))]
        parameters = {key: Parameter(torch.zeros(1 + i)) for i, key in enumerate(keys)}
        reducer = GradientSync(transport)
        order = random.Random(transport.process)
        for key in order.sample(keys, len(keys)):
            reducer.add(key, [parameters[key]], EVERYONE)
        for _ in range(3):
            for key in keys:
                parameters[key].grad = torch.full_like(parameters[key], float(transport.process))
            for key in order.sample(keys, 3):
                reducer.start(key)
            reducer.finish()
        return [float(parameters[key].grad.sum()) for key in keys]  # type: ignore[union-attr]

    for _ in range(10):
        assert run_threads(thread_world(WORLD), fn) == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


def test_the_reduction_runs_while_the_caller_goes_on() -> None:
    def fn(transport: ThreadTransport) -> bool:
        weight = Parameter(torch.zeros(2))
        reducer = GradientSync(transport)
        reducer.add(0, [weight], (0, 1))
        weight.grad = torch.ones(2)
        if transport.process == 1:
            transport.receive_object(1, 0)  # the peer has started and gone on
        reducer.start(0)
        if transport.process == 0:
            transport.send_object(None, 0, 0).wait()
        reducer.finish()
        return bool((weight.grad == 2).all())

    assert run_threads(thread_world(Topology(2, loss_rank=1)), fn) == [True, True]


def test_frozen_parameters_take_no_part_and_may_thaw() -> None:
    def fn(transport: ThreadTransport) -> list[Any]:
        weight, frozen = Parameter(torch.zeros(2)), Parameter(torch.zeros(2), requires_grad=False)
        reducer = GradientSync(transport)
        reducer.add(0, [frozen, weight], EVERYONE)
        weight.grad = torch.ones(2)
        reducer.finish()
        first = [frozen.grad, weight.grad.tolist()]
        frozen.requires_grad_()
        frozen.grad, weight.grad = torch.ones(2), None
        reducer.finish()
        return [*first, frozen.grad.tolist(), weight.grad]

    assert run_threads(thread_world(WORLD), fn) == [[None, [3.0, 3.0], [3.0, 3.0], None]] * 3


def test_parameters_frozen_while_their_gradients_wait_are_summed() -> None:
    def fn(transport: ThreadTransport) -> list[Any]:
        weights = [Parameter(torch.zeros(2)) for _ in range(3)]
        reducer = GradientSync(transport)
        reducer.add(0, weights, EVERYONE)
        weights[1].requires_grad_(False)
        if transport.process == 1:
            weights[0].grad = torch.ones(2)
        reducer.await_further()
        weights[0].requires_grad_(False)
        weights[1].requires_grad_().grad = torch.ones(2)
        reducer.await_further()
        weights[1].requires_grad_(False)
        reducer.finish()
        found = [None if each.grad is None else each.grad.tolist() for each in weights]
        weights[0].grad = torch.ones(2) * transport.process  # nobody has trained it since
        reducer.finish()
        return [*found, weights[0].grad.tolist()]

    summed = [[1.0, 1.0], [3.0, 3.0], None]
    assert run_threads(thread_world(WORLD), fn) == [[*summed, [float(process)] * 2] for process in EVERYONE]


def test_gradients_accumulate_into_what_was_reduced() -> None:
    def fn(transport: ThreadTransport) -> list[float]:
        layer = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        reducer = GradientSync(transport)
        reducer.add(0, layer.parameters(), EVERYONE)
        for set_to_none in (False, True, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            layer(torch.ones(1, 3)).sum().backward()
            layer(torch.ones(1, 3)).sum().backward()
            reducer.finish()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
            optimizer.step()
        assert layer.weight.grad is not None
        return layer.weight.grad.unique().tolist()

    assert run_threads(thread_world(WORLD), fn) == [[6.0]] * 3


def test_the_parameters_memory_format_is_kept() -> None:
    def fn(transport: ThreadTransport) -> bool:
        weight = Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        other = Parameter(torch.zeros(6, 4).t())
        sliced = Parameter(torch.zeros(4, 6)[:, ::2])
        reducer = GradientSync(transport)
        parameters = [weight, other, sliced]
        reducer.add(0, parameters, EVERYONE)
        wanted = []
        for parameter in parameters:
            parameter.grad = gradient(parameter, transport.process, 0)
            wanted.append(sum(gradient(parameter, process, 0) for process in EVERYONE))
        reducer.finish()
        assert [p.grad.stride() == p.stride() for p in parameters] == [True, True, False]
        return all(bool((p.grad == w).all()) for p, w in zip(parameters, wanted, strict=True))

    assert run_threads(thread_world(WORLD), fn) == [True] * 3


def test_there_is_never_a_second_copy_of_all_gradients() -> None:
    def fn(transport: ThreadTransport) -> list[int]:
        parameters = [Parameter(torch.zeros(1000)) for _ in range(20)]
        reducer = GradientSync(transport, bucket_bytes=8000)
        reducer.add(0, parameters, (0, 1))
        for parameter in parameters:
            parameter.grad = torch.ones(1000)
        reducer.start(0)
        assert all(parameter.grad is None for parameter in parameters)
        reducer.finish()
        gradients = [parameter.grad.untyped_storage() for parameter in parameters]  # type: ignore[union-attr]
        return [sum({storage.data_ptr(): storage.nbytes() for storage in gradients}.values())]

    assert run_threads(thread_world(Topology(1, 2)), fn) == [[80_000]] * 2


def test_sparse_gradients_raise() -> None:
    def fn(transport: ThreadTransport) -> None:
        layer = torch.nn.Embedding(4, 2, sparse=True)
        layer(torch.tensor([1])).sum().backward()
        reducer = GradientSync(transport)
        reducer.add(0, layer.parameters(), EVERYONE)
        with pytest.raises(ConfigurationError, match="sparse=False"):
            reducer.start(0)

    run_threads(thread_world(WORLD), fn)


def test_sums_in_bfloat16_are_rounded_as_said() -> None:
    """In the order of the members, after each addition: a closed form for threads."""
    generator = torch.Generator().manual_seed(5)
    gradients = torch.randn(3, 200, generator=generator)
    whole = torch.randint(0, 9, (3,), generator=generator)  # not wider than bfloat16: sent as it is

    def fn(transport: ThreadTransport) -> list[Tensor]:
        parameters = [Parameter(torch.zeros(20, 10).t()), Parameter(torch.zeros(3, dtype=torch.float16))]
        parameters[0].grad = gradients[transport.process].reshape(10, 20).clone()
        parameters[1].grad = whole.half()
        reducer = GradientSync(transport, dtype=torch.bfloat16)
        reducer.add(0, parameters, EVERYONE)
        reducer.finish()
        assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.stride() == p.stride() for p in parameters)
        return [parameter.grad for parameter in parameters]  # type: ignore[misc]

    expected = gradients[0].bfloat16()
    for process in (1, 2):
        expected = (expected.float() + gradients[process].bfloat16().float()).bfloat16()
    for sums, halves in run_threads(thread_world(WORLD), fn):
        assert torch.equal(sums.reshape(-1), expected.float())
        assert torch.equal(halves, 3 * whole.half())
    error = (expected.float() - gradients.sum(0)).abs()
    assert float(error.max()) > 0  # a sum without rounding would not be this one
    assert bool((error <= 3 * 2**-8 * gradients.abs().sum(0)).all())


def test_a_late_gradient_of_what_others_get_raises() -> None:
    def fn(transport: ThreadTransport) -> None:
        weight = Parameter(torch.zeros(2))
        reducer = GradientSync(transport)
        reducer.add(0, [weight], EVERYONE, lambda parameter: 0)
        reducer.start(0)
        if transport.process == 1:
            weight.grad = torch.ones(2)
            with pytest.raises(ConfigurationError, match="after its reduction had started"):
                reducer.finish()
        else:
            reducer.finish()

    run_threads(thread_world(WORLD), fn)


def test_each_holder_keeps_the_memory_of_its_share() -> None:
    def fn(transport: ThreadTransport) -> tuple[int, int]:
        parameters = [Parameter(torch.zeros(1000)) for _ in range(20)]
        owners = {id(parameter): number % 3 for number, parameter in enumerate(parameters)}
        reducer = GradientSync(transport, bucket_bytes=8000)
        reducer.add(0, parameters, EVERYONE, lambda parameter: owners[id(parameter)])
        for parameter in parameters:
            parameter.grad = torch.ones(1000)
        given = [weakref.ref(parameter.grad.untyped_storage()) for parameter in parameters]  # type: ignore[union-attr]
        reducer.start(0)
        assert not any(storage() for storage in given)
        reducer.finish()
        gradients = [p.grad.untyped_storage() for p in parameters if p.grad is not None]
        return len(gradients), sum({storage.data_ptr(): storage.nbytes() for storage in gradients}.values())

    assert run_threads(thread_world(WORLD), fn) == [(7, 28_000), (7, 28_000), (6, 24_000)]


def rounded(transport: Transport) -> list[float]:
    weight = Parameter(torch.zeros(64))
    weight.grad = torch.linspace(-1, 1, 64) / (transport.process + 3)
    reducer = GradientSync(transport, dtype=torch.bfloat16)
    reducer.add(0, [weight], EVERYONE)
    reducer.finish()
    return weight.grad.tolist()


def test_sums_in_bfloat16_over_gloo_keep_the_bound() -> None:
    parts = [torch.linspace(-1, 1, 64) / (process + 3) for process in EVERYONE]
    exact, magnitudes = torch.stack(parts).sum(0), torch.stack(parts).abs().sum(0)
    found = [torch.tensor(values) for values in processes.run_pipeline(rounded, WORLD)]
    assert all(torch.equal(values, found[0]) for values in found)
    error = (found[0] - exact).abs()
    assert bool((error <= 3 * 2**-8 * magnitudes).all())
    assert float(error.max()) > 0
