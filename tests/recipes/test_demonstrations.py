"""The command that runs the pages' first commands, and the pages, whose figures are those of its last runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.demonstrations import METRICS, Runs, cells, keep, main, renewed, stored
from recipes.samples import PICTURE
from tests.recipes.test_docs import DOCS, EXPERIMENTS

PAGE = """| | here | the paper |
|---|---|---|
| hardware | ? | TPU |
| time | ? | not told |
| validation loss | ? | 3.0 |
| BLEU | ? | 30 |
| parameters | 3 | 4 |

```text
old
```
"""


def made(samples: list[str]) -> Runs:
    def run(seed: int, seconds: float, loss: float) -> dict[str, Any]:
        measured = {"seed": seed, "seconds": seconds, "cpu_seconds": 2 * seconds, "load": 0.1, "samples_per_second": 12}
        return {**measured, "before": {"val_loss": 9.0}, "after": {"val_loss": loss, "test_bleu": loss / 10}}

    runs = [run(1, 59.0, 2.0), run(2, 61.0, 4.0)]
    return {"command": "python -m x", "machine": "a day; 2 cores", "runs": runs, "samples": samples}


def test_a_page_gets_the_figures_and_samples() -> None:
    page = renewed(PAGE, made(["a\n  b", "``` c"]))
    assert page.splitlines() == [
        "| | here, `size=tiny` (first command): mean of seeds 1, 2 (lowest to highest) | the paper |",
        "|---|---|---|",
        "| hardware | a day; 2 cores; load 0.1 before; two stages, 1F1B, one thread each | TPU |",
        "| time | 1 min 0 s (59 s to 1 min 1 s) | not told |",
        "| validation loss | 9.000 before training, 3.000 (2.000 to 4.000) after | 3.0 |",
        "| BLEU | 30.0 (20.0 to 40.0) | 30 |",
        "| parameters | 3 | 4 |",
        "",
        "```text",
        "a",
        "  b",
        "",
        "''' c",
        "```",
    ]
    assert renewed(page, made(["a\n  b", "``` c"])) == page
    assert renewed(PAGE, made([])).endswith("old\n```\n")


def test_pictures_and_samples_come_before_what_is_not_reproduced() -> None:
    page = renewed("# A\n\n**Not reproduced here:** all.\n", made(["a"]), ["a.png", "a_samples.png"])
    assert page.splitlines()[2:] == [
        "![Losses and metrics by step, with seed 1](pictures/a.png)",
        "",
        "![What the model makes of a few samples, with seed 1](pictures/a_samples.png)",
        "",
        "The first, the middle and the last sample of the run with seed 1, as `samples.txt` has them:",
        "",
        "```text",
        "a",
        "```",
        "",
        "**Not reproduced here:** all.",
    ]
    assert renewed(page, made(["a"]), ["a.png", "a_samples.png"]) == page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_has_the_figures_of_its_runs(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    for row in ("time", "training speed", "validation loss"):
        assert f"\n| {row} | " in page, row
    found = stored().get(name)
    if found is not None:
        assert renewed(page, found) == page
        assert found["command"] == f"python -m recipes.train experiment={name}"
        assert [row for row in cells(found) if row and f"\n| {row} | " not in page] == []
        assert not found["samples"] or "```text" in page
        assert found["runs"][0]["after"].keys() <= METRICS.keys() | {"val_masked_loss", "val_next_loss"}


def test_pictures_are_small() -> None:
    assert {
        path.name: path.stat().st_size for path in (DOCS / "pictures").iterdir() if path.stat().st_size > 80_000
    } == {}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_runs_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, output = "unet_imagenet", tmp_path / "out"
    short = ["data.source=digits", "debug=fast", "pipe=none", "trainer.devices=1", "trainer.enable_progress_bar=false"]
    main([name, *short, "--seeds", "5", "--output", str(output)])
    assert "signal to noise (PSNR)" in capsys.readouterr().out
    found = stored(output)[name]
    assert [run["seed"] for run in found["runs"]] == [5]
    assert found["runs"][0]["cpu_seconds"] > 0
    assert found["runs"][0]["after"]["val_loss"] > 0

    docs = tmp_path / "docs"
    (docs / "pictures").mkdir(parents=True)
    (docs / f"{name}.md").write_text(PAGE)
    keep(name, found, output, docs)
    assert f"{found['runs'][0]['after']['val_loss']:.3f}" in (docs / f"{name}.md").read_text()
    assert stored(docs) == {name: found}
    drawn = output / name / "seed5" / PICTURE
    assert (docs / "pictures" / f"{name}_samples.png").read_bytes() == drawn.read_bytes()
    assert f"](pictures/{name}_samples.png)" in (docs / f"{name}.md").read_text()
    assert (docs / "pictures" / f"{name}.png").stat().st_size > 0


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="There is no experiment gpt3"):
        main(["gpt3"])
    with pytest.raises(SystemExit, match="Leave out --store"):
        main(["unet_imagenet", "trainer.max_epochs=1", "--store"])
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with pytest.raises(SystemExit, match=r"has failed\.\nHint: Read .*output\.txt"):
        main(["unet_imagenet", "--output", str(tmp_path), "--seeds", "1"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_demonstration_was_run_with_three_seeds_in_under_three_minutes(name: str) -> None:
    runs = stored()[name]["runs"]
    assert len({run["seed"] for run in runs}) >= 3
    assert max(run["seconds"] for run in runs) < 180
