"""Errors go from process to process as they are."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightning_pipe import errors
from lightning_pipe.errors import PipeError, VersionError


@pytest.mark.parametrize("kind", [each for each in vars(errors).values() if isinstance(each, type)])
def test_errors_keep_message_hint_and_notes(kind: type[PipeError]) -> None:
    error = kind("5 layers cannot fill 8 stages.", hint="Use stages=5 or fewer.")
    error.add_note("of rank 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == "5 layers cannot fill 8 stages.\nHint: Use stages=5 or fewer."
        assert (again.message, again.hint, again.__notes__) == (error.message, error.hint, ["of rank 3"])


def test_a_wrong_version_is_an_import_error_too() -> None:
    assert issubclass(VersionError, ImportError)
