"""Timelines in the Trace Event Format, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING

from lightning_pipe.schedules.action import Kind
from lightning_pipe.simulate.style import NAMES, label, row_names, summary

if TYPE_CHECKING:
    from lightning_pipe.simulate.timeline import Event, Timeline

_MICROSECONDS = {"": 1000.0, "s": 1e6}
"""A simulation's unit of time is shown as a millisecond."""

_NEXT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1}


def write_chrome_trace(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write one track per rank, one slice per action, and arrows where a result goes to another rank."""
    factor = _MICROSECONDS[timeline.unit]
    names = row_names(timeline)
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"title": summary(timeline)},
        "traceEvents": [*_tracks(timeline), *_slices(timeline, factor, names), *_arrows(timeline, factor)],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _tracks(timeline: Timeline) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": timeline.title or "pipeline"}}
    for row, name in enumerate(row_names(timeline)):
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _slices(timeline: Timeline, factor: float, names: Sequence[str]) -> Iterator[dict[str, object]]:
    for event in timeline.events:
        yield {
            "ph": "X",
            "pid": 0,
            # Reductions overlap with compute, so they have a track of their own.
            "tid": f"{names[event.rank]}, reduce" if event.kind is Kind.REDUCE else event.rank,
            "ts": float(event.start) * factor,
            "dur": float(event.end - event.start) * factor,
            "name": label(event, with_stage=True),
            "cat": NAMES[event.kind],
            "args": {"stage": event.stage, "micro_batch": event.micro_batch, "pipe": event.pipe},
        }


def _arrows(timeline: Timeline, factor: float) -> Iterator[dict[str, object]]:
    """From every result to the action on another rank that waits for it."""
    waiting: dict[tuple[int, int, int | None], Event] = {
        (_NEXT[event.kind], event.stage, event.micro_batch): event for event in timeline.events if event.kind in _NEXT
    }
    for number, event in enumerate(timeline.events):
        step = _NEXT.get(event.kind)
        target = waiting.get((step, event.stage + step, event.micro_batch)) if step else None
        if target is not None and target.rank != event.rank:
            name = "activation" if step == 1 else "gradient"
            common: dict[str, object] = {"pid": 0, "id": number, "name": name, "cat": "message"}
            # Half a step inside the slices, so that viewers bind the arrow to them.
            yield {**common, "ph": "s", "tid": event.rank, "ts": float(event.start + event.end) / 2 * factor}
            yield {
                **common,
                "ph": "f",
                "bp": "e",
                "tid": target.rank,
                "ts": float(target.start + target.end) / 2 * factor,
            }
