"""The attributes of some modules at one time: what became of them since, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_pipe.intercept.contents import MISSING, Attributes, Change, Node, equal_plain
from lightning_pipe.torch_internals import DisableTorchFunction

# Parameters and submodules are not looked at: a step leaves them as they are. Buffers change in forward passes.
# A snapshot that lives as long as a batch must not keep weak references to parameters: those could not be swapped then.
_MODULE_INTERNALS = (frozenset(vars(nn.Module())) - {"_buffers"}) | {"_flat_weight_refs"}
# What the Trainer sets in a LightningModule by itself, around hooks too: none of it is a change by the step.
_LIGHTNING_INTERNALS = frozenset(
    [
        "_trainer",
        "_fabric",
        "_current_fx_name",
        "_metric_attributes",
        "_compiler_ctx",
        "_fabric_optimizers",
        "_example_input_array",
        "_param_requires_grad_state",
        "_hparams_initial",
        "_device_mesh",
        "_device",
        "_dtype",
        "_jit_is_scripting",
    ]
)
_SKIPPED = _MODULE_INTERNALS | _LIGHTNING_INTERNALS


def is_compared(name: str) -> bool:
    """Whether snapshots compare attributes of this name."""
    return name not in _SKIPPED


class Snapshot:
    """The attributes of some modules at one time.

    Args:
        modules: the modules by name.
        buffers: whether buffers count.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        buffers: bool = True,
    ) -> None:
        skipped = _SKIPPED if buffers else _SKIPPED | {"_buffers"}
        # Nodes keep their objects, so no ``id`` comes to mean another object while the snapshot lives.
        seen: dict[int, Node] = {}  # one node for each object: several may refer to it, and it may hold itself
        with DisableTorchFunction():  # a step under way must not take this for calls of its own
            self._nodes = {name: Attributes(module, seen, skipped) for name, module in modules.items()}

    def undo(self, *, for_now: bool = False) -> None:
        """Put everything back in place.

        Args:
            for_now: let copies stand for tensors that have changed in place: another snapshot puts the tensors back,
                and their values may be needed by graphs meanwhile.
        """
        with DisableTorchFunction():
            done: dict[int, Any] = {}
            for node in self._nodes.values():
                node.undo(done, for_now)

    def narrow(self) -> bool:
        """Count from now on what has become different so far, and nothing else; whether anything has."""
        found: dict[str, set[str]] = {}
        for change in self.changes():
            found.setdefault(change.path[0], set()).add(change.path[1])
        self._nodes = {name: self._nodes[name] for name in found}
        for name, node in self._nodes.items():
            node.only, node.kept = found[name], {key: node.kept[key] for key in node.kept.keys() & found[name]}
        return bool(found)

    def altered(self) -> list[tuple[tuple[str, str], bool, list[Any]]]:
        """The modules' names and attributes or buffers that have another value, or one in which something has changed.

        With each, whether it had a value before, and what has changed in place, whatever is there now.
        """
        found = list[tuple[tuple[str, str], bool, list[Any]]]()
        with DisableTorchFunction():
            for name, node in self._nodes.items():
                for holder in filter(None, (node, node.kept.get("_buffers", (None, None))[1])):
                    now = holder.items()
                    for key in (each for each in holder.kept | now if each != "_buffers"):
                        former, inner = holder.kept.get(key, (MISSING, None))
                        owners = [] if inner is None else [owner for owner, _ in inner.changes((), set())]
                        value = now.get(key, MISSING)
                        if owners or not (value is former or equal_plain(value, former)):
                            found.append(((name, key), former is not MISSING, owners))
        return found

    def changes(self) -> list[Change]:
        """What has become different since."""
        with DisableTorchFunction():
            seen: set[int] = set()
            return [change for name, node in self._nodes.items() for _, change in node.changes((name,), seen)]
