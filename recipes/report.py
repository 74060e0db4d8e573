"""What a run says at its end, and leaves in its folder for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """The results of one run.

    Args:
        recipe: its name.
        output: its folder.
        before: validation metrics before training.
        after: validation metrics after training, and those of a test.
        samples_per_second: training speed over all replicas; None when too short to measure.
        bubble: share of the ranks' time spent waiting, measured in one batch; None without a pipeline.
        predicted_bubble: the schedule's own, with equal stages.
        seconds: from start to end.
        commit: of the code.
        tags: words to find the run by.
    """

    recipe: str
    output: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    samples_per_second: float | None
    bubble: float | None
    predicted_bubble: float | None
    seconds: float
    commit: str
    tags: Sequence[str] = ()

    def write(self) -> None:
        """Writes ``summary.json`` into the run's folder."""
        (Path(self.output) / "summary.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        lines = [f"\n{self.recipe}: done in {minutes} min {seconds} s"]
        width = max([24, *(len(readable(name)) + 2 for name in self.after)])
        for name, value in self.after.items():
            before = f"{_number(self.before[name])} before training, " if name in self.before else ""
            lines.append(f"  {readable(name):<{width}}{before}{_number(value)} after")
        if self.samples_per_second is not None:
            lines.append(f"  {'training speed':<{width}}{_number(self.samples_per_second)} samples/s")
        if self.bubble is not None and self.predicted_bubble is not None:
            percent = (
                f"{self.bubble:.1%} measured in the batch of the timeline, {self.predicted_bubble:.1%} by the schedule"
            )
            lines.append(f"  {'pipeline bubble':<{width}}{percent.replace('%', ' %')}")
        lines.append(f"  everything is in {self.output}")
        return "\n".join([*lines, *(f"    {name:<22}{text}" for name, text in self.contents())])

    def contents(self) -> list[tuple[str, str]]:
        """The files that a run leaves, as far as they are there, with a word about each."""
        known = {
            "checkpoints/last.ckpt": "an ordinary Lightning checkpoint of the whole model",
            "timeline.png": "who computed what when in one batch, as measured",
            "curve.png": "losses and validation metrics by step",
            "metrics.csv": "the same as numbers",
            "config.yaml": "the whole configuration of this run",
            "train.log": "the log, with the plan",
            "summary.json": "these results, and the commit of the code",
        }
        return [(name, text) for name, text in known.items() if (Path(self.output) / name).exists()]


def readable(name: str) -> str:
    """A metric's name in words.

    Example:
        >>> readable("val_next_accuracy"), readable("train_loss")
        ('validation next accuracy', 'training loss')
    """
    start, _, rest = name.partition("_")
    words = {"val": "validation", "train": "training", "test": "test"}
    return f"{words[start]} {rest.replace('_', ' ')}" if start in words else name


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
