"""What is replaced for a time is there again afterwards, for code that has kept it as well."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.patches import all_replaced, replaced, replacements, unheard


@pytest.fixture
def others() -> list[Any]:
    """What tests before have left, such as tensors that are recorded and not collected yet."""
    return replacements()


class Owner:
    def method(self) -> str:
        return "original"


def module_with(function: Callable[..., Any]) -> ModuleType:
    module = ModuleType("some_module")
    vars(module)["function"] = function
    return module


def original() -> str:
    """What it does."""
    return "original"


def test_an_attribute_is_replaced_and_put_back(others: list[Any]) -> None:
    owner = SimpleNamespace(a=1)
    with replaced(owner, "a", 2), replaced(owner, "b", 3):
        assert vars(owner) == {"a": 2, "b": 3}
        assert replacements() == [*others, (owner, "a"), (owner, "b")]
    assert vars(owner) == {"a": 1}
    assert replacements() == others


def test_an_error_inside_changes_nothing_about_that() -> None:
    owner = Owner()

    def fail() -> None:
        with replaced(Owner, "method", lambda _: "other"), replaced(owner, "method", lambda: "own"):
            assert (owner.method(), Owner().method()) == ("own", "other")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert vars(owner) == {}
    assert owner.method() == "original"


def test_an_error_between_several_puts_back_the_first_of_them(others: list[Any]) -> None:
    owner = SimpleNamespace(value=1)

    def places() -> Iterator[tuple[Any, str, Any]]:
        yield owner, "value", 2
        raise KeyError("later")

    with pytest.raises(KeyError, match="later"), all_replaced(places()):
        pass
    assert owner.value == 1
    assert replacements() == others


def test_contexts_may_overlap_in_any_order() -> None:
    module = module_with(original)
    first, second = replaced(module, "function", lambda: "first"), replaced(module, "function", lambda: "second")
    with first:
        second.__enter__()
        assert module.function() == "second"
    assert module.function() == "second"
    second.__exit__(None, None, None)
    assert module.function is original


def test_a_function_that_was_kept_leads_to_the_original_afterwards_and_follows_the_next_run() -> None:
    module = module_with(original)
    with replaced(module, "function", lambda: "first run"):
        kept = module.function
        assert kept() == "first run"
        assert kept.__doc__ == original.__doc__
    assert kept() == "original"
    with replaced(module, "function", lambda: "second run"):
        assert kept() == "second run"
    assert kept() == "original"


def test_a_gate_that_was_kept_as_an_attribute_is_replaced_like_the_original() -> None:
    module, imported = module_with(original), module_with(original)
    with replaced(module, "function", lambda: "first run"):
        vars(imported)["function"] = module.function
    with replaced(imported, "function", lambda: "replaced"):
        assert imported.function() == "replaced"
    assert imported.function() == "original"


def test_a_bound_method_that_was_kept_leads_to_the_original() -> None:
    owner = Owner()
    with replaced(owner, "method", lambda: "other"):
        handler = owner.method
    assert handler() == "original"


def test_threads_do_not_put_back_what_others_need(others: list[Any]) -> None:
    module = module_with(original)
    inside, leave = threading.Barrier(3), threading.Event()

    def rank() -> None:
        with replaced(module, "function", lambda: "replaced"):
            inside.wait(10)
            leave.wait(10)

    ranks = [threading.Thread(target=rank) for _ in range(2)]
    for thread in ranks:
        thread.start()
    inside.wait(10)
    assert module.function() == "replaced"
    leave.set()
    for thread in ranks:
        thread.join(10)
    assert module.function is original
    assert replacements() == others


def test_filters_of_warnings_are_as_before() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with unheard("something"):
            warnings.warn("something", stacklevel=1)
            with unheard("something"):
                warnings.warn("something", stacklevel=1)
            warnings.warn("something", stacklevel=1)
        assert list(warnings.filters) == before
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["something else"]
