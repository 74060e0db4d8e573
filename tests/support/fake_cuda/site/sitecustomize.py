"""Installs the fake device in every process of a rehearsal: Python imports this file if its folder is in the path."""

import os

if os.environ.get("FAKE_CUDA_DEVICES"):
    from tests.support.fake_cuda import environment

    environment.install()
