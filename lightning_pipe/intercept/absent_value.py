"""What stands for an attribute whose value another stage has: it raises where it is read."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_pipe.errors import CutError

_HINT = (
    "Let the forward pass return it, or keep it in the LightningModule and let the step change it behind the layers. "
    "Steps, but no hooks, may read a tensor that forward sets in each call, such as a loss: `self.aux = tensor`."
)
_READS = (
    *["bool", "len", "iter", "next", "contains", "getitem", "setitem", "delitem", "call", "str", "format", "reversed"],
    *["eq", "ne", "lt", "le", "gt", "ge", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "abs"],
    *["neg", "pos", "invert", "reduce_ex", "enter", "exit", "bytes"],
)
_JOINS = (
    *["add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"],
    *["and", "or", "xor", "lshift", "rshift"],
)


class AbsentValue:
    """Stands for what the forward pass of a layer keeps, on ranks and in runs of stages that do not run the layer.

    Args:
        written: the attribute as code writes it.
        place: who has it, in words.
    """

    __slots__ = ("_place", "_written")
    __hash__ = object.__hash__

    def __init__(self, written: str, place: str) -> None:
        self._written, self._place = written, place

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # so Python asks what an object can do
            raise AttributeError(name)
        self.refuse()

    def __repr__(self) -> str:
        return f"<{self._written}, which {self._place} has>"

    def __copy__(self) -> AbsentValue:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentValue:
        return self

    def refuse(self, *_: Any) -> NoReturn:
        """Raise the error for whoever reads the value."""
        raise CutError(
            f"`{self._written}` is read where it has no value: a forward pass changes it, and {self._place} has it.",
            hint=_HINT,
        )


for _name in (*_READS, *_JOINS, *(f"{kind}{name}" for name in _JOINS for kind in "ri")):
    setattr(AbsentValue, f"__{_name}__", AbsentValue.refuse)
