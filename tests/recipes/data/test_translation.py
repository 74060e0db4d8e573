"""Pairs of sentences in several languages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.data import parallel
from recipes.data.translation import ByTemperature, Collate, ParallelText
from recipes.errors import RecipeError

NUMBERS = {"de": ["eins", "zwei", "drei", "vier"], "fr": ["un", "deux", "trois", "quatre"]}
ENGLISH = ["one", "two", "three", "four"]


def write_pairs(folder: Path, german: int = 40, french: int = 8) -> Path:
    """Writes text files as OPUS offers them."""
    folder.mkdir(parents=True)
    for language, count in (("de", german), ("fr", french)):
        for split, lines in (("train", count), ("valid", 4)):
            stem = folder / f"{split}.{language}-en"
            for suffix, words in ((language, NUMBERS[language]), ("en", ENGLISH)):
                text = "".join(f"{words[n % 4]} {words[n // 4 % 4]}\n" for n in range(lines))
                Path(f"{stem}.{suffix}").write_text(text)
    return folder


def data_module(tmp_path: Path, **settings: Any) -> ParallelText:
    defaults = {"vocabulary": 300, "length": 16, "batch_size": 4, "cache": str(tmp_path / "cache")}
    if "source" not in settings and "files" not in settings:
        settings["files"] = str(write_pairs(tmp_path / "text"))
    made = ParallelText(**defaults | settings)
    made.prepare_data()
    made.setup("fit")
    return made


def test_pairs_belong_together_and_come_padded(tmp_path: Path) -> None:
    data = data_module(tmp_path)
    words = data.words
    german = dict(zip(NUMBERS["de"] + NUMBERS["fr"], ENGLISH * 2, strict=True))
    for batch in data.train_dataloader():
        assert torch.equal(batch["mask"], batch["source"] != words.special["pad"])
        assert (batch["target"][:, 0] == words.special["bos"]).all()
        assert torch.equal(batch["target"][:, 1:], batch["labels"][:, :-1])
        for source, labels in zip(batch["source"], batch["labels"], strict=True):
            end = labels.tolist().index(words.special["eos"])
            assert (labels[end + 1 :] == words.special["pad"]).all()
            translated = " ".join(german[word] for word in words.decode(source.tolist()).split())
            assert words.decode(labels.tolist()) == translated


def test_the_weights_make_the_mean_over_pairs_the_mean_over_tokens() -> None:
    pairs = [{"source": torch.tensor([5, 2]), "target": torch.arange(3, 3 + n)} for n in (1, 4, 7)]
    batch = Collate(pad=0, begin=1)(pairs)
    tokens = (batch["labels"] != 0).sum(1)
    losses = torch.rand(3)  # summed over the tokens of every pair
    assert (losses / batch["mean_length"]).mean() == pytest.approx(losses.sum().item() / tokens.sum().item())


def test_long_texts_are_cut_off_and_still_end(tmp_path: Path) -> None:
    data = data_module(tmp_path, length=3)
    end = data.words.special["eos"]
    for batch in data.train_dataloader():
        assert batch["labels"].shape[1] <= 3
        assert ((batch["labels"] == end).sum(1) == 1).all()


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.9), (2.0, 0.75), (1000.0, 0.5)])
def test_temperature_brings_languages_together(temperature: float, share: float) -> None:
    order = ByTemperature((900, 100), temperature)
    assert order.probabilities[0] == pytest.approx(share, abs=0.001)
    drawn = order(1000, 1, 0).tolist()
    assert len(drawn) == 1000
    assert sum(index < 900 for index in drawn) / 1000 == pytest.approx(share, abs=0.04)
    counts = Counter(index for index in drawn if index >= 900)
    assert max(counts.values()) - min(counts[index] for index in range(900, 1000)) <= 1
    assert drawn != order(1000, 1, 1).tolist()
    assert drawn == order(1000, 1, 0).tolist()


def test_docstrings_are_translations_of_definitions(tmp_path: Path) -> None:
    source = '''
class Box:
    """A box. It holds things."""

    def open(self):
        """Open the box
        at its lid.

        More.
        """
        return self.lid

def undocumented():
    def inner(x):
        "Adds one."
        return x + 1
    return inner
'''
    for number in range(30):
        (tmp_path / f"module{number}.py").write_text(source)
    texts = parallel.docstrings(tmp_path)
    assert texts.languages == ["class", "function", "method"]
    found = {name: next(read()) for name, read in texts.splits["train"].items()}
    assert found["class"].target == "A box"
    assert found["method"] == ("def open(self):\n    return self.lid", "Open the box at its lid")
    assert found["function"] == ("def inner(x):\n    return x + 1", "Adds one")
    assert "docstring" not in found["class"].source
    assert "definitions and docstrings" in texts.title


def test_opus_is_streamed_in_its_own_order_of_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, configuration: str, *, split: str, streaming: bool) -> Any:
        asked.append((configuration, split, streaming))
        return [{"translation": {"en": "one", "fr": "un"}}]

    monkeypatch.setattr(parallel, "load_dataset", load)
    texts = parallel.hub("Helsinki-NLP/opus-100", ["fr-en"])
    assert list(texts.splits["train"]["fr-en"]()) == [("un", "one")]
    assert asked == [("en-fr", "train", True)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "files"}, "needs a folder"),
        ({"files": "{tmp}/nowhere"}, "no folder"),
        ({"files": "{tmp}/good", "pairs": ["es-en"]}, r"no file .*train.es-en.es"),
        ({"files": "{tmp}/good", "pairs": ["german"]}, "'german' is not a pair"),
        ({"files": "{tmp}/uneven"}, "has 3 lines and .* has 40"),
        ({"files": "{tmp}/empty"}, r"valid\.de-en\.de is empty"),
        ({"files": "{tmp}/blank"}, "validation split .* has no pairs of fr-en"),
        ({"source": "internet"}, "data.source=internet is unknown"),
        ({"files": "{tmp}/good", "vocabulary": 100}, "the model is built for 100"),
        ({"temperature": 0.5}, "temperature=0.5 is less than 1"),
    ],
)
def test_bad_texts_are_told_in_a_sentence(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_pairs(tmp_path / "good")
    (write_pairs(tmp_path / "uneven") / "train.de-en.de").write_text("eins\nzwei\ndrei\n")
    empty = write_pairs(tmp_path / "empty")
    for language in ("de", "en"):
        (empty / f"valid.de-en.{language}").write_text("")
    (write_pairs(tmp_path / "blank") / "valid.fr-en.fr").write_text("\n" * 4)
    settings = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(RecipeError, match=words):
        data_module(tmp_path, **settings)
