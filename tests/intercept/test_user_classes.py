"""Classes of the user's are told from those of libraries."""

from __future__ import annotations

from collections import OrderedDict

import torch

from lightning_pipe.intercept.stage_run import StageRun
from lightning_pipe.intercept.user_classes import is_users


def test_classes_of_libraries_are_not_the_users() -> None:
    assert not any(map(is_users, (int, OrderedDict, torch.Tensor)))
    assert is_users(type("Own", (), {"__module__": __name__}))
    assert is_users(type("Script", (), {"__module__": "__main__"}))


def test_what_this_package_puts_into_modules_is_not_the_users() -> None:
    assert not is_users(StageRun)
