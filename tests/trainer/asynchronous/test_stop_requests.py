"""A request to stop waits until all ranks know of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_pipe.trainer.asynchronous.stop_requests import StopRequests


class World:
    """One process, which answers itself."""

    replica_members = (0,)

    def agree(self, asked: bool, *, unanimous: bool, members: Any = None) -> bool:
        assert not unanimous
        return asked


def made(should_stop: bool) -> tuple[Any, StopRequests]:
    trainer, world = SimpleNamespace(should_stop=should_stop), World()
    return trainer, StopRequests(trainer, world)  # type: ignore[arg-type]


def test_a_request_is_withheld_until_it_is_agreed_on() -> None:
    trainer, requests = made(True)
    requests.withhold()
    assert trainer.should_stop is False
    requests.agree()
    assert trainer.should_stop is True
    requests.withhold()
    assert trainer.should_stop is True


def test_a_request_is_asked_once() -> None:
    trainer, requests = made(True)
    requests.withhold()
    assert requests.of_replicas() is True
    assert requests.of_replicas() is False
    requests.follow(False)
    assert trainer.should_stop is False
