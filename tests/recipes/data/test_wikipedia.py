"""Wikipedia's XML dump and WikiExtractor's output, in small files of the real formats."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import pytest

from recipes.data import documents, wikipedia
from recipes.errors import RecipeError

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo><sitename>Wikipedia</sitename><namespaces><namespace key="0" case="first-letter" /></namespaces></siteinfo>
"""
PAGE = """  <page>
    <title>{title}</title>
    <ns>{kind}</ns>
    <id>{number}</id>{redirect}
    <revision>
      <id>{number}000</id>
      <contributor><username>Someone</username><id>1</id></contributor>
      <model>wikitext</model>
      <format>text/x-wiki</format>
      <text bytes="9" xml:space="preserve">{text}</text>
    </revision>
  </page>
"""
WIKITEXT = """{{Short description|Water from clouds}}
{{Infobox weather
| name = Rain
| image = {{photo|rain.jpg|alt={{lang|en|drops}}}}
}}
[[File:Rain.jpg|thumb|[[Water]] falling in [[Paris, Texas|Paris]].]]
'''Rain''' is [[water]] that falls from [[cloud]]s.&lt;ref name="a"&gt;A [[book]].&lt;/ref&gt; It is ''wet''&amp;nbsp;-
see [http://x.org/ the page].&lt;ref name="a" /&gt;

== Measure ==
&lt;!-- nothing [[here]] --&gt;
{| class="wikitable"
|-
! Year !! mm
|-
| 1999 || {{val|20}}
|}
* a list
In H&lt;sub&gt;2&lt;/sub&gt;O, &lt;math&gt;a_{1} = 2&lt;/math&gt; holds &amp;lt; 3. See [[Star Wars: A New Hope]].

[[Category:Weather]]
[[de:Regen]]
"""
CLEANED = """Rain is water that falls from clouds. It is wet\xa0-
see the page.
In H2O,  holds < 3. See Star Wars: A New Hope."""


def page(number: int, text: str, *, kind: int = 0, redirect: bool = False) -> str:
    away = '\n    <redirect title="Rain" />' if redirect else ""
    return PAGE.format(title=f"Page {number}", kind=kind, number=number, redirect=away, text=text)


def dump(articles: int = 3) -> bytes:
    """The articles, and before them what is none."""
    others = [page(1, "#REDIRECT [[Rain]]", redirect=True), page(2, "Talk about it.", kind=1)]
    pages = [page(number + 3, f"Café {number} is old. It has {number} doors.") for number in range(articles)]
    return f"{HEAD}{''.join([*others, page(3, WIKITEXT), *pages])}</mediawiki>\n".encode()


def write_dump(path: Path, articles: int = 3) -> Path:
    """As the multistream dumps are packed: several streams, one behind the other."""
    content = dump(articles)
    half = len(content) // 2
    path.write_bytes(bz2.compress(content[:half]) + bz2.compress(content[half:]))
    return path


def test_wikitext_becomes_prose(tmp_path: Path) -> None:
    found = list(wikipedia.articles(write_dump(tmp_path / "enwiki-pages-articles-multistream.xml.bz2")))
    assert found == [CLEANED, *(f"Café {number} is old. It has {number} doors." for number in range(3))]


@pytest.mark.parametrize("name", ["enwiki.xml", "enwiki.xml.gz", "enwiki.xml.bz2"])
def test_a_dump_is_divided_into_documents(tmp_path: Path, name: str) -> None:
    pack = {".xml": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[(tmp_path / name).suffix]
    (tmp_path / name).write_bytes(pack(dump()))
    found = documents.local_files(tmp_path)
    assert list(found.splits["validation"]()) == [documents.sentences_of(CLEANED)]
    assert next(found.splits["train"]()) == ["Café 0 is old.", "It has 0 doors."]
    limited = documents.local_files(tmp_path / name, documents=2)
    assert len(list(limited.splits["train"]())) == 1
    assert limited.fingerprint != found.fingerprint


def test_a_dump_is_read_as_a_stream(tmp_path: Path) -> None:
    file = write_dump(tmp_path / "enwiki.xml.bz2", articles=5_000)
    file.write_bytes(file.read_bytes()[:-100])
    found = documents.local_files(file)  # reads the first articles alone
    assert next(found.splits["train"]()) == ["Café 0 is old.", "It has 0 doors."]
    with pytest.raises(RecipeError, match=r"enwiki\.xml\.bz2 ends too early or is broken: Compressed file ended"):
        list(found.splits["train"]())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.xml", dump()[:-40], "a.xml ends too early or is broken: no element found"),
        ("a.xml.bz2", dump(), "a.xml.bz2 ends too early or is broken: Invalid data stream"),
        ("a.xml.gz", gzip.compress(dump())[:-20], "a.xml.gz ends too early or is broken: Compressed file ended"),
        ("a.xml", dump().decode().encode("latin-1"), "a.xml ends too early or is broken: not well-formed"),
        ("a.xml", b"<html><body/></html>", "a.xml begins with <html>, not as a dump of Wikipedia"),
        ("wiki_00", b"Rain is old.\n", "wiki_00 has text before <doc"),
        (
            "wiki_00",
            b'<doc id="1" url="x" title="Rain">\nRain\n\nIt is wet.\n',
            "wiki_00 ends within the article 'Rain'",
        ),
        ("wiki_00", b'<doc id="1" title="Caf\xe9">\nCaf\xe9\n</doc>\n', "wiki_00 is not in UTF-8"),
        ("wiki_00", b'{"id": "1", "title": "Rain"}\n', "Line 1 of .*wiki_00 is no JSON object with a text"),
        ("wiki_00.bz2", bz2.compress(b'<doc id="1" title="x">\n' * 9)[:-9], "wiki_00.bz2 ends too early or is broken"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=words) as caught:
        list(documents.local_files(tmp_path).splits["train"]())
    assert caught.value.hint is not None


@pytest.mark.parametrize("kind", ["doc", "json", "bz2"])
def test_wikiextractor_s_files_are_documents(tmp_path: Path, kind: str) -> None:
    titles = ['"Weird" Al', "Rain & sun", "Snow"]
    for folder, names in (("AA", titles[:2]), ("AB", titles[2:])):
        (tmp_path / folder).mkdir()
        written = "".join(map(as_json if kind == "json" else as_doc, names)).encode()
        name, content = ("wiki_00.bz2", bz2.compress(written)) if kind == "bz2" else ("wiki_00", written)
        (tmp_path / folder / name).write_bytes(content)
    found = documents.local_files(tmp_path)
    expected = [[f"{title} is 3 < 4.", "It is old.", "Second paragraph."] for title in titles]
    assert list(found.splits["validation"]()) == expected[:1]
    assert list(found.splits["train"]()) == expected[1:]


def as_doc(title: str) -> str:
    head = f'<doc id="1" url="https://en.wikipedia.org/wiki?curid=1" title="{title}">'
    told = title.replace("&", "&amp;")
    return f"{head}\n{told}\n\n{told} is 3 &lt; 4. It is old.\n\nSecond paragraph.\n</doc>\n\n"


def as_json(title: str) -> str:
    text = f"{title} is 3 < 4. It is old.\nSecond paragraph."
    return json.dumps({"id": "1", "url": "https://en.wikipedia.org/wiki?curid=1", "title": title, "text": text}) + "\n"
