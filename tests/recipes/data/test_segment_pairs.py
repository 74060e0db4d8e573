"""Masked pairs of segments, as BERT wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.data import documents
from recipes.data.loading import Draw
from recipes.data.segment_pairs import IGNORED, MaskedPairs, _shortened, runs_of
from recipes.errors import RecipeError

DOCUMENT = "\n".join(f"Sentence {number} of this text tells of number {number * number}." for number in range(12))


def write_documents(folder: Path, train: int = 20, validation: int = 4) -> Path:
    """Writes one sentence on a line and an empty line between documents."""
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text(f"{DOCUMENT}\n\n\n" * train)
    (folder / "valid.txt").write_text(f"{DOCUMENT}\n\n" * validation)
    return folder


def data_module(tmp_path: Path, **settings: Any) -> MaskedPairs:
    defaults = {"vocabulary": 320, "length": 64, "batch_size": 8, "cache": str(tmp_path / "cache")}
    if "source" not in settings and "files" not in settings:
        settings["files"] = str(write_documents(tmp_path / "text"))
    made = MaskedPairs(**defaults | settings)
    made.prepare_data()
    made.setup("fit")
    return made


def test_samples_are_what_bert_wants(tmp_path: Path) -> None:
    data = data_module(tmp_path)
    special = data.words.special
    for batch in (next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))):
        assert {value.dtype for value in batch.values()} == {torch.int64}
        for index in range(8):
            row = {key: value[index] for key, value in batch.items()}
            count = int(row["attention_mask"].sum())
            tokens = torch.where(row["labels"] == IGNORED, row["input_ids"], row["labels"])[:count]
            separators = (tokens == special["sep"]).nonzero().flatten().tolist()
            assert tokens[0] == special["cls"]
            assert len(separators) == 2
            assert separators[1] == count - 1
            assert row["token_type_ids"].tolist() == [
                int(separators[0] < place < count) for place in range(len(row["token_type_ids"]))
            ]
            assert (row["input_ids"][count:] == special["pad"]).all()
            assert (row["labels"][count:] == IGNORED).all()
            assert (row["labels"] != IGNORED).sum() == max(1, round(0.15 * (count - 3)))


def test_half_of_the_second_segments_follow_the_first(tmp_path: Path) -> None:
    data = data_module(tmp_path)
    split, words = data.split("train"), data.words
    labels = []
    for index in range(len(split)):
        sample = split[Draw(3, index)]
        tokens = torch.where(sample["labels"] == IGNORED, sample["input_ids"], sample["labels"])
        first, second = (
            words.decode(tokens[(sample["token_type_ids"] == kind) & (sample["attention_mask"] == 1)].tolist())
            for kind in (0, 1)
        )
        labels.append(int(sample["next_sentence_label"]))
        if labels[-1] == 0:
            text = DOCUMENT.replace("\n", "")
            assert text.index(first) + len(first) <= text.rindex(second)
    assert 0.3 < np.mean(labels) < 0.7


def test_runs_stay_inside_documents() -> None:
    runs = runs_of(np.full(20, 5), np.array([7, 8, 20]), length=14).tolist()
    assert runs == [[0, 3], [3, 6], [6, 7], [7, 8], [8, 11], [11, 14], [14, 17], [17, 20]]


def test_the_longer_segment_is_shortened() -> None:
    random = np.random.default_rng(0)
    first, second = _shortened(np.arange(50), np.arange(6), 20, random)
    assert (len(first), len(second)) == (14, 6)
    first, second = _shortened(np.arange(50), np.arange(30), 20, random)
    assert len(first) + len(second) == 20
    assert abs(len(first) - len(second)) <= 1


def test_wikipedia_is_streamed_and_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    articles = [{"text": f"Article {number}. It has two sentences."} for number in range(401)]
    asked: list[Any] = []

    def load(name: str, configuration: str, *, split: str, streaming: bool) -> Any:
        asked.append((name, configuration, split, streaming))
        return iter(articles)

    monkeypatch.setattr(documents, "load_dataset", load)
    text = documents.hub("wikimedia/wikipedia", "20231101.en", documents=400)
    train, validation = (list(text.splits[split]()) for split in ("train", "validation"))
    assert [first for first, _ in validation] == ["Article 0.", "Article 200."]
    assert len(train) == 398
    assert asked[0] == ("wikimedia/wikipedia", "20231101.en", "train", True)


def test_lines_of_the_standard_library_are_sentences(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"module{number}.py").write_text(f"import os\n\n\ndef f{number}():\n    return {number}\n")
    text = documents.standard_library(tmp_path)
    assert next(text.splits["train"]())[0] == "import os"
    assert "standard library" in text.title


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "files"}, "needs a folder"),
        ({"files": "{tmp}/nowhere"}, "no folder"),
        ({"files": "{tmp}/empty"}, r"no file ending in \.txt, \.jsonl"),
        ({"files": "{tmp}/blank"}, "split of .* is empty"),
        ({"files": "{tmp}/good", "vocabulary": 100}, "the model is built for 100"),
        ({"files": "{tmp}/good", "length": 100_000}, "at least 2 are needed"),
        ({"files": "{tmp}/good", "tokenizer": "{tmp}/nowhere"}, "tokeniser .*nowhere cannot be read"),
    ],
)
def test_bad_text_is_told_in_a_sentence(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_documents(tmp_path / "good", train=2, validation=1)
    (tmp_path / "empty").mkdir()
    write_documents(tmp_path / "blank")
    (tmp_path / "blank" / "valid.txt").write_text("\n \n")
    settings = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(RecipeError, match=words):
        data_module(tmp_path, **settings).split("validation")
