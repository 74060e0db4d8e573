"""What a stage has received, and how it gets into the user's step at the stage's first layer."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.incoming import Incoming
from lightning_pipe.intercept.skipped_layers import SkippedLayers
from lightning_pipe.intercept.tensor_state import version_of
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.torch_internals import graph_nodes


class Arrival:
    """The tensors that one run of the step has received, before and after they are in the step.

    Args:
        inbound: what has been received; ``None`` on the first stage.
        tracker: that of the run.
        skipped: the layers that earlier stages have run instead.

    Attributes:
        pending: what is not in the step yet.
        incoming: the entry of the tensors into autograd, once they are in the step.
        copied: the tensors that have come as copies of one memory, with their versions and numbers.
    """

    def __init__(self, inbound: Crossing | None, tracker: Tracker, skipped: SkippedLayers) -> None:
        self.pending = inbound
        self._tracker, self._skipped = tracker, skipped
        self.incoming: Incoming | None = None
        self._begin = 0
        self.copied: list[tuple[Tensor, int | None, int]] = []

    def fill(self) -> None:
        """Give the placeholders of the run the received values."""
        if self.pending is None:
            return
        self._tracker.arrive()
        path, values = self.pending.path, self.pending.tensors
        self.pending = None
        with self._tracker.paused():
            entries = [entry for entry in path.entries if entry.number in values]
            self.incoming = Incoming(
                [values[entry.number] for entry in entries],
                [entry.requires_grad for entry in entries],
                skips=any(call.stashed for call in path.calls),
            )
            # behind the node of `Incoming`: what it makes of the received tensors is older than this stage's own graph
            self._begin = graph_nodes()
            self._fill(entries, self.incoming)
            shared = {entry.number for entry in entries if entry.shared}
            alive = self._tracker.numbers.alive() if shared else ()
            self.copied = [(tensor, version_of(tensor), number) for number, tensor in alive if number in shared]

    def _fill(self, entries: list[LiveTensor], incoming: Incoming) -> None:
        # Nothing may hold a value when its turn comes: a view keeps its base from being swapped. So the list lets go of
        # each value as it is taken, from the end, which is the first one.
        incoming.tensors.reverse()
        for entry in entries:
            self._tracker.numbers.fill(entry.number, incoming.tensors.pop())

    def is_older(self, tensor: Tensor | GradientEdge) -> bool:
        """Whether a tensor of a graph was there before this stage's first layer, for earlier stages to use."""
        node = tensor.node if isinstance(tensor, GradientEdge) else tensor.grad_fn
        leaf = getattr(node, "variable", None if node is not None else tensor)
        if leaf is None:
            return bool(node._sequence_nr() < self._begin)  # type: ignore[union-attr]
        answered = (parameter for module in self._skipped.modules for parameter in module.parameters())
        return self._tracker.is_leaf_before(leaf) or any(parameter is leaf for parameter in answered)

    def check_copies(self) -> None:
        """Raise if one of two tensors with one memory has changed since the cut at which they became two."""
        for tensor, version, number in self.copied:
            if version_of(tensor) != version:
                raise CutError(
                    f"tensor {number}, {tuple(tensor.shape)}, is changed in place after a cut, and another tensor that "
                    "crosses the cut shares its memory.",
                    hint="Use the out-of-place form, or .clone() one of them.",
                )
