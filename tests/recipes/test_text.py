"""Blocks of text from files, the standard library and the hub."""

from __future__ import annotations

from logging import LogRecord
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from recipes.data import choice, sources
from recipes.data.text import TextBlocks
from recipes.errors import RecipeError
from tests.recipes.conftest import ARTICLE, write_parquet, write_text


def data_module(tmp_path: Path, **settings: Any) -> TextBlocks:
    made = TextBlocks(
        **{"vocabulary": 300, "block_length": 16, "batch_size": 4, "cache": str(tmp_path / "cache")} | settings
    )
    made.prepare_data()
    made.setup("fit")
    return made


@pytest.mark.parametrize("write", [write_text, write_parquet])
def test_blocks_are_the_text_in_order_and_without_gaps(tmp_path: Path, write: Any) -> None:
    data = data_module(tmp_path, files=str(write(tmp_path / "wiki")))
    tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer" / "tokenizer.json"))
    stream = data.split("validation").blocks.flatten().tolist()
    text = tokenizer.decode(stream)
    assert len(text) > 9 * len(ARTICLE)
    assert (ARTICLE * 10).startswith(text)


def test_every_process_reads_what_one_has_prepared(tmp_path: Path) -> None:
    settings = {"files": str(write_text(tmp_path / "wiki")), "cache": str(tmp_path / "cache"), "vocabulary": 300}
    TextBlocks(block_length=16, **settings).prepare_data()
    other = TextBlocks(block_length=16, **settings)
    other.setup("fit")
    assert len(other.train_dataloader()) > 0


def words(logged: list[LogRecord]) -> str:
    return "\n".join(record.getMessage() for record in logged)


def test_a_second_run_finds_the_tokens_of_the_first(tmp_path: Path, logged: list[LogRecord]) -> None:
    files = str(write_text(tmp_path / "wiki"))
    first = data_module(tmp_path, files=files)
    assert "Tokenised" in words(logged)
    logged.clear()
    second = data_module(tmp_path, files=files)
    assert "Tokenised" not in words(logged)
    assert first.folder == second.folder


def test_changed_text_is_tokenised_anew(tmp_path: Path) -> None:
    before = data_module(tmp_path, files=str(write_text(tmp_path / "wiki", train=40)))
    after = data_module(tmp_path, files=str(write_text(tmp_path / "wiki", train=50)))
    assert len(after.split("train")) > len(before.split("train"))


def small_library(folder: Path, files: int = 40) -> Path:
    for number in range(files):
        (folder / f"package{number % 3}").mkdir(parents=True, exist_ok=True)
        (folder / f"package{number % 3}" / f"module{number}.py").write_text(
            f"def f{number}():\n    return {number}\n" * 5
        )
    (folder / "test").mkdir()
    (folder / "test" / "test_it.py").write_text("assert True\n")
    (folder / "package0" / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    return folder


def test_the_standard_library_is_split_by_file(tmp_path: Path) -> None:
    corpus = sources.standard_library(small_library(tmp_path / "lib"))
    train, validation = (corpus.splits[split]["text"] for split in ("train", "validation"))
    assert len(train) + len(validation) == 40  # neither tests nor files in other encodings
    assert not set(train) & set(validation)
    assert 0 < len(validation) < len(train)
    assert "standard library" in corpus.title


@pytest.mark.slow  # reads all of it; the test above has a small one
def test_the_running_python_has_enough_text() -> None:
    corpus = sources.standard_library()
    size = {split: sum(map(len, corpus.splits[split]["text"])) for split in ("train", "validation")}
    assert size["train"] > 4_000_000
    assert 0.03 < size["validation"] / size["train"] < 0.3


def test_files_of_the_library_are_separated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = sources.standard_library(small_library(tmp_path / "lib"))
    monkeypatch.setattr(sources, "standard_library", lambda: corpus)
    data = data_module(tmp_path, source="standard_library", vocabulary=300)
    separators = int((data.split("train").blocks == 0).sum())
    assert separators == pytest.approx(len(corpus.splits["train"]), abs=1)


def test_without_network_auto_takes_the_standard_library_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[LogRecord]
) -> None:
    corpus = sources.standard_library(small_library(tmp_path / "lib"))
    monkeypatch.setattr(sources, "standard_library", lambda: corpus)
    monkeypatch.setattr(choice, "hub_answers", lambda name: False)
    data_module(tmp_path, source="auto")
    assert "replaced by Python's standard library" in words(logged)


def test_with_network_auto_takes_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[LogRecord]
) -> None:
    folder = write_parquet(tmp_path / "wiki")
    asked: list[tuple[str, str]] = []

    def load(name: str, configuration: str) -> Any:
        from datasets import load_dataset

        asked.append((name, configuration))
        files = {split: str(next(folder.glob(f"{split}*"))) for split in ("train", "validation")}
        return load_dataset("parquet", data_files=files)

    monkeypatch.setattr(choice, "hub_answers", lambda name: True)
    monkeypatch.setattr(sources, "load_dataset", load)
    data_module(tmp_path, source="auto")
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1")]
    assert "Text: Salesforce/wikitext (wikitext-2-raw-v1) from the hub" in words(logged)


def test_offline_the_hub_does_not_answer() -> None:
    assert not choice.hub_answers("Salesforce/wikitext", seconds=1.0)


def test_a_ready_tokeniser_is_taken_from_its_folder(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    first = data_module(tmp_path, files=str(write_text(tmp_path / "wiki")))
    trained = Tokenizer.from_file(str(first.folder / "tokenizer" / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>").save_pretrained(tmp_path / "ready")
    second = data_module(tmp_path, files=str(tmp_path / "wiki"), tokenizer=str(tmp_path / "ready"))
    assert np.array_equal(first.split("train").blocks, second.split("train").blocks)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "files"}, "needs a folder"),
        ({"files": "{tmp}/nowhere"}, "no folder"),
        ({"files": "{tmp}/empty"}, r"no train\* and valid\* ending"),
        ({"files": "{tmp}/one_split"}, r"no train\* and valid\* ending"),
        ({"files": "{tmp}/blank"}, "split of .* is empty"),
        ({"files": "{tmp}/mixed"}, "mixes parquet and text"),
        ({"files": "{tmp}/column"}, "'text' is needed"),
        ({"files": "{tmp}/wiki", "block_length": 10**6}, "less than one block"),
        ({"files": "{tmp}/wiki", "vocabulary": 200}, "the model is built for 200"),
    ],
)
def test_bad_data_is_told_in_a_sentence(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    from datasets import Dataset

    write_text(tmp_path / "wiki")
    (tmp_path / "empty").mkdir()
    write_text(tmp_path / "one_split")
    (tmp_path / "one_split" / "wiki.valid.raw").unlink()
    write_text(tmp_path / "blank")
    (tmp_path / "blank" / "wiki.valid.raw").write_text("\n \n")
    write_text(tmp_path / "mixed")
    write_parquet(tmp_path / "mixed")
    (tmp_path / "column").mkdir()
    for split in ("train", "validation"):
        Dataset.from_dict({"words": ["a"]}).to_parquet(tmp_path / "column" / f"{split}.parquet")
    settings = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(RecipeError, match=words):
        data_module(tmp_path, **settings)
