"""The loops of the user's own train the same GPT-2 to the same losses as one device."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from tests.examples.test_examples import EXAMPLES, run
from tests.support.processes import outcomes, results

SECONDS = 120
pytestmark = pytest.mark.timeout(SECONDS + 15)
BLOCKS = 32
"""Of text, in two batches: a third of what the scripts take by themselves."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@cache
def small_gpt2(blocks: int) -> ModuleType:
    """The scripts' module, with so many blocks of text."""
    spec = importlib.util.spec_from_file_location("small_gpt2", EXAMPLES / "small_gpt2.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.texts.__defaults__ = (blocks,)
    return module


@cache
def one_device(blocks: int) -> list[float]:
    """The losses of the batches and of an evaluation, with plain PyTorch."""
    example = small_gpt2(blocks)
    model, losses = example.small_gpt2(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(example.texts(), batch_size=16)
    for batch in loader:
        loss = example.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, torch.stack([example.loss_of(model, batch) for batch in loader]).mean().item()]


def assert_same(output: str, folder: Path, blocks: int) -> None:
    """The losses that a script prints, and the one of what it has saved."""
    found = [float(number) for number in re.findall(r"loss (\d\.\d{6})", output)]
    assert found == pytest.approx(one_device(blocks), abs=2e-6)
    saved = torch.load(folder / "saved", weights_only=True)
    example = small_gpt2(blocks)
    model = example.small_gpt2()
    model.load_state_dict(saved.get("model", saved))
    with torch.no_grad():
        losses = torch.stack([example.loss_of(model, batch) for batch in DataLoader(example.texts(), batch_size=16)])
    assert losses.mean().item() == pytest.approx(one_device(blocks)[-1], abs=2e-6)


def script_of(process: int, script: str, folder: Path) -> None:
    """Run a script as a launcher does, in a process that has the libraries already."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.modules["small_gpt2"] = small_gpt2(BLOCKS)
    sys.argv = [script, "--output", "saved"]
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.mark.parametrize("script", ["plain_loop.py", "fabric.py", "accelerate_loop.py"])
def test_a_loop_trains_as_one_device(script: str, tmp_path: Path) -> None:
    if script == "accelerate_loop.py":
        pytest.importorskip("accelerate", reason="the loop is for those who use Accelerate")
    ended = outcomes(script_of, 2, timeout=SECONDS, group_timeout=None, script=script, folder=tmp_path)
    results(ended)
    assert_same("".join(each.output for each in ended), tmp_path, BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launcher"),
    [("plain_loop.py", ()), ("plain_loop.py", TORCHRUN), ("fabric.py", ()), ("accelerate_loop.py", TORCHRUN)],
)
def test_the_command_of_a_script_starts_it(script: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Fresh processes spend ten seconds and more on imports."""
    words = [*launcher, str(EXAMPLES / script), "--output", "saved"]
    assert_same(run(tmp_path, *words), tmp_path, 96)
