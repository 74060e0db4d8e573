"""What torch says of its functions, and what the tables say of those in Python."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_pipe.intercept.call_record import LEAF
from lightning_pipe.intercept.torch_functions import (
    changed_in_place,
    draws,
    function_name,
    is_random,
    leaves_of,
    results_of,
    unique,
    values_read,
)

X, Y = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "changed"),
    [
        ("add", (X, Y), {}, []),
        ("add_", (X, Y), {}, [X]),
        *[(name, (X, Y), {}, [X]) for name in ("__iadd__", "__ilshift__", "__irshift__", "__iand__", "relu_")],
        ("__setitem__", (X, 0, 1.0), {}, [X]),
        ("data.__set__", (X, Y), {}, [X]),
        ("add", (X, X), {"out": Y}, [Y]),
        *[("relu", (X, flag), {}, [X] * flag) for flag in (True, False)],
        *[("relu", (X,), {"inplace": flag}, [X] * flag) for flag in (True, False)],
        ("relu", (X,), {}, []),
        ("batch_norm", (torch.ones(1, 2), X, Y), {"training": True}, [X, Y]),
        ("batch_norm", (torch.ones(1, 2), X, Y), {"training": False}, []),
        ("embedding", (torch.tensor([0]), X), {"max_norm": 1.0}, [X]),
        ("__init__", (X,), {}, []),
    ],
)
def test_changes_in_place_are_known_by_name(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], changed: list[torch.Tensor]
) -> None:
    found = changed_in_place(name, args, kwargs)
    assert list(map(id, found)) == list(map(id, changed))


def test_what_draws_is_known() -> None:
    for function in (F.dropout, F.fractional_max_pool2d, F.multi_head_attention_forward, torch.pca_lowrank):
        assert draws(function, function.__name__)
    assert draws(torch.nn.init.xavier_uniform_, "xavier_uniform_")
    assert draws(lambda x: x, "of somebody else"), "not torch's: nobody knows"
    for function in (F.relu, F.linear, F.cross_entropy, F.layer_norm, torch.relu, torch.einsum, torch.Tensor.norm):
        assert not draws(function, function.__name__)
    random = (
        "rrelu_",
        "native_dropout",
        "lstm",
        "rand",
        "_standard_gamma",
        "scaled_dot_product_attention",
        "bernoulli",
    )
    assert all(map(is_random, random))
    assert not any(map(is_random, ("relu", "matmul", "add_", "max_pool2d", "no_such_function", "__init__")))


def may_draw(function: FunctionType) -> bool:
    """Whether the code of a function of torch names what draws, or calls functions in Python that do."""
    waiting, seen = [function], set[FunctionType]()
    while waiting:
        each = inspect.unwrap(waiting.pop())
        if not isinstance(each, FunctionType) or each in seen or not each.__module__.startswith("torch."):
            continue
        seen.add(each)
        names = names_in(each.__code__)
        if any(map(is_random, names)):
            return True
        found = [each.__globals__.get(name, getattr(F, name, None)) for name in names]
        found += [cell.cell_contents for cell in each.__closure__ or ()]
        waiting += [other for other in found if isinstance(other, FunctionType)]
    return False


def names_in(code: CodeType) -> set[str]:
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)


@pytest.mark.filterwarnings("ignore")
def test_functions_of_torch_in_python_that_draw_are_listed() -> None:
    listed = [each for each in torch.overrides.get_overridable_functions().values() for each in each]
    public = [each for name, each in vars(torch.nn.init).items() if name.endswith("_") and name[0] != "_"]
    drawing = {function_name(each) for each in (*listed, *public) if isinstance(each, FunctionType) and may_draw(each)}
    assert [name for name in drawing if not is_random(name)] == []
    assert {"dropout", "multi_head_attention_forward", "fractional_max_pool2d_with_indices", "pca_lowrank"} <= drawing


def test_numbers_that_are_read_are_kept_and_addresses_are_not() -> None:
    _, [value] = values_read("item", 3.5)  # type: ignore[misc]
    assert value.value == 3.5
    assert values_read("data_ptr", 1234) == (LEAF, (0,))
    assert values_read("sin", X) is None


def test_small_helpers() -> None:
    assert function_name(torch.Tensor.grad.__get__) == "grad.__get__"  # type: ignore[attr-defined]
    assert leaves_of((X, [1, {"y": Y}]), {"z": 2}) == [X, 1, Y, 2]
    assert list(map(id, results_of((X, 1), [Y, X]))) == [id(X), id(Y)]
    assert list(map(id, unique([X, Y, X]))) == [id(X), id(Y)]
