"""The entries that processes make in the store when one of them fails or waits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

Kind = Literal["error", "hang", "gone", "asked", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """What went wrong first.

    Args:
        process: the process where it went wrong.
        name: how messages name that process.
        text: the traceback, where the process stands, or what is known about a process that says nothing itself.
        kind: what kind of failure it is; a process that was asked to end, or interrupted, is at no fault.
    """

    process: int
    name: str
    text: str
    kind: Kind = "error"

    def __str__(self) -> str:
        failed = f"failed first:\n{self.text}"
        return f"{self.name.capitalize()} {failed if self.kind == 'error' else self.text}"


class FailureStore:
    """The board's entries in the store, over a connection of its own: the process's other ones may be waiting.

    Args:
        store: reached by all processes.
        prefix: how the names of the entries begin.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]

    def publish(self, failure: Failure) -> None:
        """Enter a failure, unless there is one."""
        self._store.compare_set("failure", "", json.dumps(asdict(failure)))

    def failure(self) -> Failure | None:
        """The first failure."""
        text = self.noted("failure")
        return None if text is None else Failure(**json.loads(text))

    def note(self, key: str, text: str) -> None:
        """Enter something under a name of its own."""
        self._store.set(key, text)

    def noted(self, key: str) -> str | None:
        """What is entered under a name."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def noted_by_all(self, keys: Sequence[str]) -> list[str] | None:
        """What is entered under several names, once something is under all of them."""
        return [self._store.get(key).decode() for key in keys] if self._store.check(list(keys)) else None
