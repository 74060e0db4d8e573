"""How numbers that a step logs or returns for micro-batches join, learnt from comparisons in the first batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_pipe.engine.first_batch.loss_check import LossCheck
from lightning_pipe.trainer.data.joining import Comparison
from lightning_pipe.trainer.warn_once import WarnOnce
from lightning_pipe.trainer.whole_model.logging import LogKey


class NumberRules:
    """Learns from loss checks whether numbers are means, sums, least or greatest values of micro-batches.

    Attributes:
        rules: how numbers join, by `LogKey` for what is logged, by place for what is returned.
    """

    def __init__(self) -> None:
        self.rules: dict[Any, str | None] = {}
        self._last: dict[Any, tuple[float, str]] = {}
        self._comparisons: dict[Any, Comparison] = {}
        self._warn = WarnOnce()

    def note(self, found: Iterable[tuple[Any, float, str]]) -> None:
        """Note the numbers of one run of the step for a comparison.

        Args:
            found: names, values, and how such numbers join by default.
        """
        self._last = {name: (value, default) for name, value, default in found}

    def values(self) -> dict[Any, float]:
        """The numbers that were noted last, by name."""
        return {name: value for name, (value, _) in self._last.items()}

    def compared(self, check: LossCheck | None) -> dict[Any, Comparison]:
        """What a check has compared, with the default of every number."""
        if check is None:
            return {}
        return {
            name: Comparison(self._last[name][1], pairs, check.rounding)
            for name, pairs in check.compared.items()
            if name in self._last
        }

    def learn(self, seen: Iterable[Mapping[Any, Comparison]]) -> None:
        """Take over the comparisons of the ranks with the last stage, and warn about numbers without a rule."""
        found = [(name, comparison) for each in seen for name, comparison in each.items()]
        for name, comparison in found:
            known = self._comparisons.setdefault(name, Comparison(comparison.default, []))
            # numbers that fit several rules in one batch may fit a single one in all batches
            known.seen.extend(comparison.seen)
            known.rounding = max(known.rounding, comparison.rounding)
        for name in dict.fromkeys(name for name, _ in found):
            known = self._comparisons[name]
            self.rules[name] = known.rule
            if known.rule is None and known.default != "same":
                self._warn_of(name, known)

    def _warn_of(self, name: Any, comparison: Comparison) -> None:
        one, other, both, _ = comparison.example()
        what = f"logs as {name.name!r}" if isinstance(name, LogKey) else f"returns as {name}"
        self._warn(
            f"no rule {name}",
            f"What the step {what} is {one:.6g} and {other:.6g} for two micro-batches and {both:.6g} for both "
            "together: neither their mean nor their sum. For the batch it is merged from the micro-batches "
            f"({comparison.default}), and is not what one device computes. Log the sums that it is made of, or a "
            "torchmetrics metric for the epoch (on_step=False, on_epoch=True).",
        )
