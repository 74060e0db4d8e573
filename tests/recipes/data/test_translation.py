"""Pairs of sentences in several languages."""

from __future__ import annotations

import struct
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.data import catalogues, parallel
from recipes.data.translation import ParallelText, collated, drawn, probabilities
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
    batch = collated(pairs, pad=0, begin=1)
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
    order = partial(drawn, 1000, 1, sizes=(900, 100), temperature=temperature)
    assert probabilities((900, 100), temperature)[0] == pytest.approx(share, abs=0.001)
    first = order(0).tolist()
    assert len(first) == 1000
    assert sum(index < 900 for index in first) / 1000 == pytest.approx(share, abs=0.04)
    counts = Counter(index for index in first if index >= 900)
    assert max(counts.values()) - min(counts[index] for index in range(900, 1000)) <= 1
    assert first != order(1).tolist()
    assert first == order(0).tolist()


def write_catalogue(file: Path, messages: dict[str, str]) -> None:
    """Writes what msgfmt makes of messages: two tables of lengths and places, and the texts."""
    header = {"": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n != 1;\n"}
    entries = sorted((key.encode(), value.encode()) for key, value in (header | messages).items())
    start = 28 + 16 * len(entries)
    texts, tables = b"", []
    for column in range(2):
        for entry in entries:
            tables.append(struct.pack("<II", len(entry[column]), start + len(texts)))
            texts += entry[column] + b"\0"
    file.parent.mkdir(parents=True, exist_ok=True)
    places = (28, 28 + 8 * len(entries))
    file.write_bytes(struct.pack("<7I", 0x950412DE, 0, len(entries), *places, 0, 0) + b"".join(tables) + texts)


@pytest.fixture
def german(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two German catalogues, one broken one, and no other language."""
    folder = tmp_path / "locale" / "de" / "LC_MESSAGES"
    many = {f"there are {n} files": f"es gibt {n} Dateien" for n in range(1000)}
    odd = {
        "menu\x04Open the file": "Datei\nöffnen",
        "one file was\0%d files were": "eine Datei war\0%d Dateien waren",
        "OK": "In Ordnung",
        "the same as before": "the same as before",
    }
    write_catalogue(folder / "a.mo", many | odd)
    write_catalogue(folder / "b.mo", {"there are 7 files": "sieben Dateien", "no such file": "keine solche Datei"})
    (folder / "c.mo").write_bytes(b"broken")
    monkeypatch.setattr(catalogues, "ROOTS", (tmp_path / "locale",))
    return folder


def test_all_pairs_are_those_that_the_files_have(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "pairs")
    for language, text in (("en", "one\n"), ("sv", "ett\n")):
        for split in ("train", "valid"):
            (folder / f"{split}.en-sv.{language}").write_text(text * 4)
    for split in ("train", "valid"):
        for language in ("pt_BR", "en"):
            (folder / f"{split}.pt_BR-en.{language}").write_text("text\n" * 4)
    (folder / "README.all-en.txt").write_text("All of it.")
    texts = parallel.local_files(folder, ["*-en"])
    assert sorted(texts.splits["train"]) == ["de-en", "fr-en", "pt_BR-en", "sv-en"]
    assert next(iter(texts.splits["train"]["sv-en"]())) == ("ett", "one")


def test_catalogues_are_translations_of_messages(german: Path) -> None:
    texts = catalogues.messages(["de-en"])
    train, validation = (list(texts.splits[split]["de-en"]()) for split in ("train", "validation"))
    assert {("Datei öffnen", "Open the file"), ("eine Datei war", "one file was")} <= {*train, *validation}
    assert ("es gibt 7 Dateien", "there are 7 files") in {*train, *validation}, "the first translation counts"
    assert len(train) + len(validation) == 1003
    assert 0 < len(validation) < 20
    assert not {pair.target for pair in train} & {pair.target for pair in validation}
    reverse = catalogues.messages(["en-de"]).splits["train"]["en-de"]
    assert list(reverse()) == [pair[::-1] for pair in train]
    assert texts.fingerprint != catalogues.messages(["en-de"]).fingerprint
    with pytest.raises(RecipeError, match="No catalogue translates de to fr"):
        catalogues.messages(["de-fr"])


def test_without_network_auto_takes_the_catalogues(
    german: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("recipes.data.choice.hub_answers", lambda name: False)
    settings = {"source": "auto", "cache": str(tmp_path / "cache"), "vocabulary": 300}
    assert len(data_module(tmp_path, pairs=["de-en"], **settings).split("train")) > 900
    with pytest.raises(RecipeError, match=r"train split of messages .* has no pairs of fr-en.\nHint: .*data\.pairs"):
        data_module(tmp_path, pairs=["de-en", "fr-en"], **settings)


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
        ({"files": "{tmp}/good", "pairs": ["*-sv"]}, "no pairs with sv"),
        ({"source": "catalogues", "pairs": ["*-en"]}, r"'\*-en' are all pairs in local files"),
        ({"files": "{tmp}/uneven"}, "different numbers of lines"),
        ({"files": "{tmp}/empty"}, "validation split .* has no pairs of de-en"),
        ({"files": "{tmp}/blank"}, "validation split .* has no pairs of fr-en"),
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
