"""Builds the extension once for each source and torch, and says why that is not possible."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

KNOWN = ("2.13",)
"""The releases of torch whose slots have been looked at."""
SOURCE = Path(__file__).with_name("device.cpp")
_NAME = "fake_cuda_device"


class UnknownTorchError(Exception):
    """The slots of this torch may have changed."""


def obstacle() -> str | None:
    """Why the extension cannot be built here; ``None`` if it can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no compiler {compiler}: on Debian and Ubuntu `apt-get install g++` brings it"
    return None if sys.platform == "linux" else f"it is written for Linux, not for {sys.platform}"


def check_torch(version: str) -> None:
    """Raise if nobody has looked at this torch.

    Raises:
        UnknownTorchError: another release than those that are known.
    """
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise UnknownTorchError(
            f"The fake device is known to fit torch {', '.join(KNOWN)}, and this is {version}. Look whether "
            f"{SOURCE.name} still fits (its tests say so), then add the release to KNOWN in {__name__}."
        )


def folder() -> Path:
    """Where the extension for this source and this torch lies, or will."""
    import torch

    python = f"{sys.implementation.cache_tag}"
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {python}".encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "lightning_pipe_tests" / f"fake_cuda-{digest}"


def built() -> Path:
    """The extension, which is built if it is not there (a minute). Processes that come meanwhile wait.

    Raises:
        UnknownTorchError: see `check_torch`.
    """
    import torch

    check_torch(torch.__version__)
    target = folder()
    library = target / f"{_NAME}.so"
    if library.exists():
        return library
    target.mkdir(parents=True, exist_ok=True)
    with open(target / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(target)
    return library


def _compile(target: Path) -> None:
    import subprocess
    import sysconfig

    import torch
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    unfinished = target / "unfinished.so"
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"),
        *(f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))),
        *(str(SOURCE), "-o", str(unfinished)),
        *(f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{libraries}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The fake device could not be built: {done.stderr[-4000:]}")
    unfinished.rename(target / f"{_NAME}.so")


def loaded() -> ModuleType:
    """The extension, in this process."""
    library = built()
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module
