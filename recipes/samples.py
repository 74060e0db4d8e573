"""Samples that a run leaves: a few of the validation split, with what the model makes of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from matplotlib.figure import Figure
from torch import Tensor

SHOWN = 8  # in all

Shown = list[str] | Figure
"""One text for each sample, or a picture of all."""


def write(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, folder: Path) -> None:
    """Lets the module predict the samples of `predict_dataloader`, and writes ``samples.txt`` or ``samples.png``.

    Args:
        trainer: predicts on one device or in the stages of a pipeline.
        module: of `recipes.modules`, which tells by ``shown`` what a reader gets to see.
        data: with these samples, and with the tokeniser as ``words`` where there is one.
        folder: of the run.
    """
    predicted: Any = trainer.predict(module, datamodule=data)
    if not trainer.is_global_zero or not predicted:
        return
    words = getattr(data, "words", None)
    shown: list[Shown] = [module.shown(batch, words) for batch in predicted]  # type: ignore[operator]
    for one in shown:
        if isinstance(one, Figure):
            one.savefig(folder / "samples.png", dpi=80)
    texts = [text for one in shown if isinstance(one, list) for text in one]
    if texts:
        (folder / "samples.txt").write_text("\n\n".join(texts) + "\n")


def indented(title: str, text: str) -> str:
    """A title, and below it a text of several lines.

    Example:
        >>> print(indented("given", "def f():"))
        given:
            def f():
    """
    return f"{title}:\n{textwrap.indent(text.strip(chr(10)), '    ')}"


def images(rows: Mapping[str, Tensor], titles: Sequence[str] = ()) -> Figure:
    """Draws images of values from -1 to 1, each sample in a column.

    Args:
        rows: by what they show, shape [samples, channels, height, width] with one channel or three.
        titles: above the samples.
    """
    samples = len(next(iter(rows.values())))
    figure = Figure(figsize=(0.9 * samples + 0.7, len(rows) + (0.4 if titles else 0.1)), layout="constrained")
    for line, (axes_of_row, (name, tensor)) in enumerate(
        zip(figure.subplots(len(rows), samples, squeeze=False), rows.items(), strict=True)
    ):
        for column, (axes, image) in enumerate(zip(axes_of_row, tensor.detach().float().cpu(), strict=True)):
            picture = image[0] if len(image) == 1 else image.permute(1, 2, 0)
            axes.imshow(picture.clamp(-1, 1).numpy() / 2 + 0.5, interpolation="nearest")
            axes.images[0].set(cmap="gray", clim=(0, 1))
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(name)
            if line == 0 and titles:
                axes.set_title(titles[column], fontsize=9)
    return figure
