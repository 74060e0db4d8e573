"""Figures of demonstrations in the table of a recipe's page, and samples below it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from recipes.demonstrations.runs import Demonstration


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


METRICS: dict[str, tuple[str, Callable[[float], str]]] = {
    "val_loss": ("validation loss", "{:.3f}".format),
    "val_perplexity": ("validation perplexity", "{:,.0f}".format),
    "val_top1": ("top-1 accuracy", _percent),
    "val_top5": ("top-5 accuracy", _percent),
    "val_psnr": ("signal to noise (PSNR)", "{:.1f} dB".format),
    "val_masked_accuracy": ("accuracy of masked tokens", _percent),
    "val_next_accuracy": ("accuracy of the next sentence", _percent),
    "val_token_accuracy": ("accuracy of the next token", _percent),
    "test_bleu": ("BLEU", lambda value: f"{100 * value:.1f}"),
}
"""For each metric the first cell of its row, and what writes a value in words."""
ROW = re.compile(r"^(\| ?([^|]*?) \| )(.*?)(?= \|)", re.MULTILINE)
END = "**Not reproduced here:**"
TEXT = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def renewed(page: str, found: Demonstration, pictures: Sequence[str] = ()) -> str:
    """A page with the figures and the samples of a demonstration in the place of those that it has.

    In each row of the table that the runs tell something about, the second cell is written anew. So is the block of
    code with the language "text". That block and pictures which the page does not show yet are put near its end.

    Args:
        page: Markdown.
        found: what its first command came to.
        pictures: names of those in the folder ``pictures`` that belong to the page.
    """
    told = cells(found)
    page = ROW.sub(lambda row: row[1] + told.get(row[2], row[3]), page)
    for name in pictures:
        if f"](pictures/{name})" not in page:
            what = "What the model makes of a few samples" if "samples" in name else "Losses and metrics by step"
            page = _before_the_end(page, f"![{what}, with seed {found.runs[0].seed}](pictures/{name})")
    if not found.samples:
        return page
    if not TEXT.search(page):
        first = f"the run with seed {found.runs[0].seed}"
        start = f"The first, the middle and the last sample of {first}, as `samples.txt` has them:"
        page = _before_the_end(page, f"{start}\n\n```text\n```")
    samples = "\n\n".join(found.samples).replace("```", "'''") + "\n"
    return TEXT.sub(lambda _: samples, page)


def _before_the_end(page: str, text: str) -> str:
    """The page with a paragraph before what it says about what is not reproduced."""
    return page.replace(END, f"{text}\n\n{END}", 1) if END in page else f"{page}\n{text}\n"


def cells(found: Demonstration) -> dict[str, str]:
    """The cells of a demonstration by the first cell of their row.

    Args:
        found: the runs.
    """
    runs = found.runs
    seeds = ", ".join(str(run.seed) for run in runs)
    told = f"mean of seeds {seeds} (lowest to highest)" if len(runs) > 1 else f"seed {seeds}"
    rows = {
        "": f"here, `size=tiny` (first command): {told}",
        "hardware": f"{found.machine}; load {runs[0].load:.1f} before; two stages, 1F1B, one thread each",
        "time": _spread([run.seconds for run in runs], _minutes),
        "computing time of both processes": _spread([run.cpu_seconds for run in runs], _minutes),
    }
    if speeds := [run.samples_per_second for run in runs if run.samples_per_second is not None]:
        rows["training speed"] = _spread(speeds, "{:.0f} samples/s".format)
    for name, (row, text) in METRICS.items():
        if name in runs[0].after:
            after = _spread([run.after[name] for run in runs], text)
            before = [run.before[name] for run in runs if name in run.before]
            start = f"{text(statistics.mean(before))} before training, " if before else ""
            rows[row] = f"{start}{after}{' after' if before else ''}"
    return rows


def _spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The mean, and the lowest and highest value where there are several."""
    if len(values) == 1:
        return text(values[0])
    return f"{text(statistics.mean(values))} ({text(min(values))} to {text(max(values))})"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
