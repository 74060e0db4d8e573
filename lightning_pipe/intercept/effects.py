"""What a layer leaves behind besides its result: changed lists and dictionaries, tensors kept as attributes.

A stage that skips a layer must leave the same behind, with placeholders for the tensors, or code after the
layers reads less than on one device and nobody notices.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import Place, is_data, is_own, written
from lightning_pipe.intercept.objects import content_of, objects_of, same_content, state_of, unseen
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.tensor_state import same_objects, version_of
from lightning_pipe.torch_internals import tree_leaves

if TYPE_CHECKING:
    from lightning_pipe.intercept.tracker import Tracker

_CONTAINERS = (list, dict, OrderedDict, defaultdict)


class Effect(NamedTuple):
    """One thing left behind.

    Args:
        where: for an attribute, its place seen from the layer; for a changed list or dictionary, its number among those
            in the arguments; for a changed object, its number among those that the arguments lead to.
        state: of an object, without its tensors.
    """

    where: Place | int
    state: bytes | None = None


class Watch:
    """Looks at the arguments and attributes of one call, before and after it.

    Args:
        name: the layer or outside module.
        module: the module.
        arguments: the positional ones, then the keywords' values.
        leaves: their leaves.

    Attributes:
        kept: the attributes of the module and its parts before the call, by their paths, if they are looked for.
        foreign: those of modules that it reaches and that are no parts of it, by their names.
    """

    kept: Snapshot | None = None

    def __init__(self, name: str, module: nn.Module, arguments: Sequence[Any], leaves: Sequence[Any]) -> None:
        self.name, self.module = name, module
        self.containers = list(containers_in(arguments))
        self._contents = [_contents(container) for container in self.containers]
        self._objects = objects_of(leaves)
        self._states = [content_of(each) for each in self._objects]
        # those that hold tensors, with the leaves before the call and their versions
        self._attributes: dict[Place, tuple[Any, list[tuple[Any, int | None]]]] = {}

    def seek(self, foreign: Mapping[str, nn.Module]) -> None:
        """Look for attributes from now on.

        Args:
            foreign: modules that this one reaches and that are no parts of it, by their names.
        """
        self._attributes = {
            place: (value, [(leaf, version_of(leaf)) for leaf in tree_leaves(value)])
            for place, value in _attributes(self.module)
        }
        self.kept = Snapshot({path: part for path, part in self.module.named_modules() if is_own(part)})
        self.foreign = Snapshot(foreign)

    def attributes(self) -> Iterator[tuple[Place, Tensor]]:
        """The tensors that the module keeps as attributes before the call; none where nobody looks for them."""
        for place, (_, leaves) in self._attributes.items():
            yield from ((place, leaf) for leaf, _ in leaves if isinstance(leaf, Tensor))

    def effects(self, tracker: Tracker) -> Iterator[tuple[Effect, Any]]:
        """What has changed since, with the list, dictionary or attribute that it is, or the tensors of an object.

        Raises:
            CutError: an argument of another kind has changed, or a tensor that the module keeps has in place.
        """
        for number, (container, contents) in enumerate(zip(self.containers, self._contents, strict=True)):
            if not same_objects(_contents(container), contents):
                yield Effect(number), container
        for number, (each, before) in enumerate(zip(self._objects, self._states, strict=True)):
            if same_content(content_of(each), before):
                continue
            if not tracker.shows_objects:
                if tracker.come_back is not None:  # a cache, for instance, is of use in steps of several passes alone
                    tracker.come_back(self.name)
                raise unseen(self.name, each)
            state, tensors = state_of(self.name, each, self._objects)
            yield Effect(number, state), tensors
        if self.kept is not None:
            yield from self._attribute_effects(tracker.numbers.derived)

    def kept_objects(self, effects: Iterable[Effect], leaves: Sequence[Any]) -> dict[int, Any]:
        """The objects that the call has changed, and those that it has put into them, by ``id``.

        Args:
            effects: those of the call.
            leaves: those of its arguments.
        """
        changed = [self._objects[at] for at, state in effects if state is not None and isinstance(at, int)]
        before = {id(each) for each in self._objects}
        return {id(each): each for each in (*changed, *(new for new in objects_of(leaves) if id(new) not in before))}

    def _attribute_effects(self, derived: Callable[[Tensor], bool]) -> Iterator[tuple[Effect, Any]]:
        # of a change of what is derived other stages know by itself
        for place, value in _attributes(self.module):
            leaves = tree_leaves(value)
            former, before = self._attributes.get(place, (None, []))
            if former is value and not isinstance(value, Tensor):
                continue  # what grows from call to call stays with its stage
            if not same_objects(leaves, [leaf for leaf, _ in before]):
                yield Effect(place), value
            elif any(version_of(leaf) != version for leaf, version in before) and not any(
                isinstance(leaf, Tensor) and derived(leaf) for leaf in leaves
            ):
                raise CutError(
                    f"'{self.name}' changes `{written(self.name, *place)}` in place, a tensor that is no "
                    "buffer: other stages would not see it.",
                    hint="Register it as a buffer, or set another tensor in its place: `self.x = self.x * 0.9`.",
                )


def containers_in(values: Iterable[Any]) -> Iterator[Any]:
    """The lists and dictionaries among the arguments of a call, in order, with those inside them."""
    for value in values:
        kind = type(value)
        if kind in _CONTAINERS:
            yield value
            yield from containers_in(value if kind is list else value.values())
        elif kind is tuple:
            yield from containers_in(value)


def _contents(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


def _attributes(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """The attributes of a module and its parts that hold tensors; parameters and buffers are not attributes here."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            holds = isinstance(value, (Tensor, list, tuple, dict)) and is_data(name)
            if holds and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                yield (path, name), value
