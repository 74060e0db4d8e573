"""The table of the page of results is that of the file."""

from __future__ import annotations

from tests.gpu.page import PAGE, written


def test_the_page_has_what_the_file_holds() -> None:
    assert written(PAGE.read_text()) == PAGE.read_text()
