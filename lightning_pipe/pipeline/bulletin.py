"""What processes tell each other through the store when one of them fails or all of them wait."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Failure:
    """What went wrong first.

    Args:
        process: where.
        name: how messages name it.
        text: the traceback, or the report of a hang.
        hang: whether it is a report.
    """

    process: int
    name: str
    text: str
    hang: bool = False

    def __str__(self) -> str:
        if self.hang:
            return f"Nobody has failed; {self.name} asked all ranks where they are:\n{self.text}"
        return f"{self.name.capitalize()} failed first:\n{self.text}"


class Bulletin:
    """The board's entries in the store. Every thread has one of its own, since a store client serves one at a time."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def clone(self) -> Bulletin:
        """The same entries over a connection of its own."""
        return Bulletin(self._store.clone(), self._prefix)  # type: ignore[attr-defined]

    def publish(self, failure: Failure) -> bool:
        """Enter a failure; whether it is the first one."""
        text = json.dumps(asdict(failure))
        return self._enter("failure", text)

    def failure(self) -> Failure | None:
        """The first failure."""
        if not self._has("failure"):
            return None
        return Failure(**json.loads(self._store.get(self._prefix + "failure")))

    def acknowledge(self) -> None:
        """Enter that one more process has read the failure."""
        self._store.add(self._prefix + "readers", 1)

    def readers(self) -> int:
        """How many processes have read the failure."""
        return self._store.add(self._prefix + "readers", 0)

    def claim(self, process: int) -> bool:
        """Enter who tells the user the reason; whether this process is the first to do so."""
        return self._enter("teller", str(process))

    def claimed(self) -> bool:
        """Whether a process has entered that it tells the reason."""
        return self.noted("teller") is not None

    def note(self, key: str, text: str) -> None:
        """Enter something under a name of its own."""
        self._store.set(self._prefix + key, text)

    def noted(self, key: str) -> str | None:
        """What is entered under a name."""
        return self._store.get(self._prefix + key).decode() if self._has(key) else None

    def add(self, key: str) -> int:
        """How many processes have called this with this name."""
        return self._store.add(f"{self._prefix}{key}", 1)

    def ask(self, process: int) -> bool:
        """Ask all processes where they are; whether this process is the one that asks and reports."""
        return self._enter("asker", str(process))

    def asked(self) -> bool:
        """Whether a process asks where all are."""
        return self._has("asker")

    def answer(self, process: int, place: str) -> None:
        """Enter where a process is."""
        self._store.set(f"{self._prefix}place/{process}", place)

    def place(self, process: int) -> str | None:
        """Where a process is; ``None`` while it has not answered."""
        return self._store.get(f"{self._prefix}place/{process}").decode() if self._has(f"place/{process}") else None

    def _has(self, key: str) -> bool:
        return bool(self._store.check([self._prefix + key]))

    def _enter(self, key: str, value: str) -> bool:
        return self._store.compare_set(self._prefix + key, "", value) == value.encode()
