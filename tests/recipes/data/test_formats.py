"""The formats in which people have their data, and what is never replaced by something else."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from recipes.data import choice, documents, files, image_sources, parallel
from recipes.data.parallel import Pair
from recipes.errors import RecipeError

TEXTS = [f"Rain fell on day {number}. Nobody came to town {number}." for number in range(5)]
PAIRS = [(f"Satz {number}", f"Sentence {number}") for number in range(4)]


def write_documents(folder: Path, kind: str) -> Path:
    from datasets import Dataset

    folder.mkdir(parents=True)
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    if kind == "parquet":  # as the dump has it, below the folder of its configuration
        (folder / "20231101.en").mkdir()
        Dataset.from_dict({"title": TEXTS, "text": TEXTS}).to_parquet(folder / "20231101.en" / "train-00000.parquet")
    elif kind == "jsonl":
        (folder / "wiki.jsonl").write_text("\n".join(rows) + "\n")
    elif kind == "jsonl.gz":
        with gzip.open(folder / "wiki.jsonl.gz", "wt") as file:
            file.write("\n".join(rows))
    else:
        (folder / "book.txt").write_text("\n\n".join(TEXTS))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "txt"])
def test_documents_come_in_every_format(tmp_path: Path, kind: str) -> None:
    folder = write_documents(tmp_path / "wiki", kind)
    found = documents.local_files(folder)
    expected = [documents.sentences_of(text) for text in TEXTS]
    assert list(found.splits["validation"]()) == expected[:1]
    assert list(found.splits["train"]()) == expected[1:]
    (file,) = (path for path in folder.rglob("*") if path.is_file())
    assert list(documents.local_files(file).splits["train"]()) == expected[1:]


def test_documents_without_text_are_told_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(RecipeError, match=r"Line 1 of .*a\.jsonl is no JSON object with a text: KeyError\('text'\)"):
        documents.local_files(tmp_path)
    (tmp_path / "a.jsonl").write_text("no object\n")
    with pytest.raises(RecipeError, match=r"Line 1 of .*a\.jsonl is no JSON object with a text: JSONDecodeError"):
        documents.local_files(tmp_path)


@pytest.mark.parametrize("name", ["Books.de-en", "Books.en-de", "deep/er/de-en"])
def test_pairs_are_two_files_at_any_depth(tmp_path: Path, name: str) -> None:
    for language, texts in zip(("de", "en"), zip(*PAIRS, strict=True), strict=True):
        file = tmp_path / f"{name}.{language}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(texts) + "\n")
    (tmp_path / "Books.de-enx.de").write_text("not of this pair")
    found = parallel.local_files(tmp_path, ["de-en"])
    assert list(found.splits["validation"]["de-en"]()) == [Pair(*PAIRS[0])]
    assert list(found.splits["train"]["de-en"]()) == [Pair(*pair) for pair in PAIRS[1:]]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, r"no file .*train\.de-en\.de"),
        ({"a.de-en.de": "x"}, r"no file .*a\.de-en\.en"),
        ({"a.de-en.de": "x\ny", "a.de-en.en": "x"}, r"a\.de-en\.de and .*a\.de-en\.en have different numbers of lines"),
        ({"valid.de-en.de": "x", "valid.de-en.en": "x"}, r"has no train\*"),
    ],
)
def test_pairs_that_cannot_be_read_are_told(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=words):
        list(parallel.local_files(tmp_path, ["de-en"]).splits["train"]["de-en"]())


def picture(colour: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(content, "PNG")
    return content.getvalue()


def test_a_shard_is_told(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x.png"), io.BytesIO())
    with pytest.raises(RecipeError, match=r"a\.tar has x\.png in a\.tar, which is no class of ImageNet"):
        image_sources.local_folder(tmp_path)


def test_a_folder_of_classes_needs_no_splits(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.png").write_bytes(picture(number))
    found = image_sources.local_folder(tmp_path)
    assert (found.classes, len(found.splits["train"]), len(found.splits["validation"])) == (2, 8, 2)


def test_only_the_default_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "hub_answers", lambda name: False)
    stand_in = ("digits", "handwritten digits")
    assert choice.choose("auto", None, "default/name", "default/name", stand_in) == "digits"
    with pytest.raises(RecipeError, match=r"data\.name=my/own is no folder.*\n.*data\.source=digits"):
        choice.choose("auto", None, "my/own", "default/name", stand_in)
    assert choice.choose("auto", None, str(tmp_path), "default/name", stand_in) == "files"
    assert choice.choose("auto", "", "default/name", "default/name", stand_in) == "files"
    with pytest.raises(RecipeError, match="no folder ''"):
        files.chosen("", "default/name")
    write_documents(tmp_path / "wiki", "txt")
    assert files.chosen(None, str(tmp_path / "wiki")) == tmp_path / "wiki"
