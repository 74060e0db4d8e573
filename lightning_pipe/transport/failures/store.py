"""The entries that processes make in the store when one of them fails or all of them wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_pipe.transport.failures.store_client import StoreClient

Kind = Literal["error", "hang", "silent", "gone", "asked", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """What went wrong first.

    Args:
        process: the process where it went wrong.
        name: how messages name that process.
        text: the traceback, the report of a hang, or what is known about a process that says nothing itself.
        kind: what kind of failure it is; a silent process may still be there; one that was asked to end, or
            interrupted, is at no fault.
    """

    process: int
    name: str
    text: str
    kind: Kind = "error"

    def __str__(self) -> str:
        if self.kind == "hang":
            return f"Nobody has failed; {self.name} asked all ranks where they are:\n{self.text}"
        if self.kind == "error":
            return f"{self.name.capitalize()} failed first:\n{self.text}"
        return f"{self.name.capitalize()} {self.text}"

    @property
    def overdue(self) -> bool:
        """Whether something did not come in time."""
        return self.kind in ("hang", "silent")


class FailureStore:
    """The board's entries in the store, over a connection of its own.

    Args:
        store: reached by all processes.
        prefix: how the names of the entries begin.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._client = StoreClient(store.clone())  # type: ignore[attr-defined]
        self._prefix = prefix

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def publish(self, failure: Failure) -> bool:
        """Enter a failure; whether it is the first one."""
        text = json.dumps(asdict(failure))
        return self._enter("failure", text)

    def failure(self) -> Failure | None:
        """The first failure."""
        key = self._prefix + "failure"
        text = self._client.ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if text is None else Failure(**json.loads(text))

    def acknowledge(self) -> None:
        """Enter that one more process has read the failure."""
        self._client.ask(lambda store: store.add(self._prefix + "readers", 1))

    def readers(self) -> int:
        """How many processes have read the failure."""
        return self._client.ask(lambda store: int(store.add(self._prefix + "readers", 0)))

    def become_reporter(self, process: int) -> bool:
        """Enter that this process prints the reason for the user; whether no other process has entered it before."""
        return self._enter("reporter", str(process))

    def has_reporter(self) -> bool:
        """Whether a process has entered that it prints the reason."""
        return self.noted("reporter") is not None

    def note(self, key: str, text: str) -> None:
        """Enter something under a name of its own."""
        self._client.ask(lambda store: store.set(self._prefix + key, text))

    def noted(self, key: str) -> str | None:
        """What is entered under a name."""
        name = self._prefix + key
        return self._client.ask(lambda store: store.get(name).decode() if store.check([name]) else None)

    def noted_by_all(self, keys: Sequence[str]) -> list[str] | None:
        """What is entered under several names, once something is under all of them."""
        names = [self._prefix + key for key in keys]
        return self._client.ask(lambda store: [store.get(n).decode() for n in names] if store.check(names) else None)

    def ask(self, process: int) -> bool:
        """Ask all processes where they are; whether this process is the one that asks and reports."""
        return self._enter("asker", str(process))

    def asked(self) -> bool:
        """Whether a process asks where all are."""
        return self._client.ask(lambda store: bool(store.check([self._prefix + "asker"])))

    def answer(self, process: int, place: str) -> None:
        """Enter where a process is."""
        self._client.ask(lambda store: store.set(f"{self._prefix}place/{process}", place))

    def place(self, process: int) -> str | None:
        """Where a process is; ``None`` while it has not answered."""
        key = f"{self._prefix}place/{process}"
        return self._client.ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _enter(self, key: str, value: str) -> bool:
        """Make an entry unless it is there; whether it has this value now. Of several processes one succeeds."""
        return self._client.ask(lambda store: bool(store.compare_set(self._prefix + key, "", value) == value.encode()))
