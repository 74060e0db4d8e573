"""What a run reports at its end."""

from __future__ import annotations

from recipes.report import Report


def test_a_run_that_ends_before_a_validation_is_reported() -> None:
    report = Report("gpt2", "outputs/1", {"val_loss": 7.5}, {}, 12.0, None, None, 3.0, "0123abc")
    assert "outputs/1" in str(report)
    assert "val_loss" not in str(report)
