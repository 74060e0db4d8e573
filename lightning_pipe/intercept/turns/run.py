"""One run of an evaluation step by ranks that take turns.

A step may run the layers several times: a loop that generates tokens, test-time augmentation, a teacher and a student
with layers in common. Each rank runs it once, from the beginning to the end. Two ranks, and a loop over two tokens::

    def validation_step(self, batch):           rank 0: layers 0 and 1      rank 1: layers 2 and 3
        for _ in range(2):
            h = self.embed(tokens)              computes                    waits; follows with placeholders
            h = self.layers[0](h)               computes                      "
            h = self.layers[1](h)               computes                      "
            h = self.layers[2](h)               tells what it did, waits    gets h; computes
            h = self.layers[3](h)                 "                         computes
            tokens = sample(self.head(h))       follows with placeholders   computes
                                                gets tokens: its turn       tells what it did, waits
        return tokens                           ends                        returns

What the code reads from a tensor (whether all sequences have ended), and the state of the random generators after it
has drawn from them, come with what a rank tells. Key-value caches stay on the ranks of their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.layer_calls import RunCache
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.stage_run import EndOfStage, StageRun
from lightning_pipe.intercept.torch_functions import leaves_of
from lightning_pipe.intercept.turns.tracker import TurnTracker
from lightning_pipe.torch_internals import tree_leaves

if TYPE_CHECKING:
    from lightning_pipe.engine.turns import Turns


class TurnRun(StageRun):
    """One run of an evaluation step on one rank; see above.

    Args:
        names: the layers.
        ranks: by layer, the rank that runs it.
        last: the rank whose result counts.
        mail: reaches the other ranks.
        isolated: gives a context with the random stream of a key.
        generators: of the random numbers that all ranks draw alike.
        cache: what runs have in common, and earlier ones have kept.

    Attributes:
        complete: whether the step has returned on the rank whose result counts.
    """

    tracker: TurnTracker
    complete = False
    stage_here = None

    def __init__(
        self,
        names: Sequence[str],
        ranks: Sequence[int],
        last: int,
        mail: Turns,
        isolated: Callable[..., AbstractContextManager[None]],
        generators: Sequence[torch.Generator],
        cache: RunCache,
    ) -> None:
        self._names, self._ranks, self._last, self._mail = names, ranks, last, mail
        self._ended = False
        tracker = TurnTracker(mail, ranks[0], cache.parameter_use, isolated, generators)
        # every rank is shown all calls, in their order
        everything = StageLayers(0, range(len(names) if mail.ranks == 1 else 0), names, {})
        super().__init__(everything, isolated, cache, tracker=tracker)

    @override
    def returning(self, result: Any) -> None:
        """The step is about to return ``result``; to be called where its contexts can still be told that it ended."""
        if self._ended:
            return
        self._ended = True
        self.tracker.in_place.check_arrays()
        if not self.tracker.finish(self._last, tree_leaves(result)):
            raise EndOfStage

    @override
    def returned(self, result: Any) -> None:
        self.skips.check_empty()
        self.complete = True

    @override
    def check_backward(self, outputs: Any, inputs: Any) -> None:
        """A backward pass begins inside the step."""
        if not self.surroundings.inside:
            raise CutError(
                "a backward pass runs in an evaluation step that calls the layers several times, on several ranks.",
                hint="Take derivatives inside one layer, or use one device.",
            )

    @override
    def call_layer(self, number: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer of the sequence is called."""
        _, key = self._numbers.next(number)
        return self._call(self._ranks[number], self._names[number], key, layer, forward, args, kwargs)

    @override
    def call_module(
        self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module outside the sequence that has parameters is called."""
        held = [*module.parameters(), *module.buffers()]
        rank = self._mail.place(name, held, self.tracker.holder)
        return self._call(rank, name, (key,), module, forward, args, kwargs)

    def _call(self, rank: int, name: str, key: Any, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.tracker.pass_to(rank, leaves_of(args, kwargs))
        if self.tracker.waiting:
            return self.skipped_layers.answer(name, module, args, kwargs)
        # what has been stashed on other ranks it may pop
        self.tracker.touch([each for each in self.skips.values() if isinstance(each, Placeholder)], name)
        return self.layer_calls.run(name, key, module, forward, args, kwargs)
