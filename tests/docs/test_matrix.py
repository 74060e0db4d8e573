"""The page of features is up to date and complete."""

from __future__ import annotations

import pytest

from tests.support import matrix
from tests.support.matrix import AREAS, PAGE, VERDICTS, Claim


@pytest.fixture(scope="module")
def claims() -> list[Claim]:
    return matrix.claims(matrix.collected())


def test_the_page_is_up_to_date(claims: list[Claim]) -> None:
    assert PAGE.read_text() == matrix.page(claims), "run `python -m tests.support.matrix`"


def test_no_cell_is_empty(claims: list[Claim]) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 100
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4
        assert all(cells) or cells[0] == "feature", row
    for claim in claims:
        assert claim.area in AREAS, claim
        assert claim.verdict in VERDICTS, claim
        assert claim.how or claim.verdict == "works", claim


def test_everything_that_lightning_has_is_in_a_row(claims: list[Claim]) -> None:
    rows = {(claim.area, name.strip("` ")) for claim in claims for name in claim.feature.split(",")}
    missing = [f"{area}: {name}" for area, name in matrix.required() if (area, name) not in rows]
    assert not missing, missing
