"""The examples run as their first lines say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.processes import free_port
from tests.trainer.test_launcher import clean_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 180
pytestmark = pytest.mark.timeout(SECONDS + 15)


def run(folder: Path, *words: str) -> str:
    """The output of a script in a process of its own, in a folder of its own."""
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def environment() -> dict[str, str]:
    return clean_environment() | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def accuracy(output: str) -> float:
    found = re.search(r"accuracy (0\.\d+)", output)
    assert found, output
    return float(found[1])


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    output = run(tmp_path, str(EXAMPLES / "digits.py"), "--devices", "2", "--epochs", "2")
    assert "Pipeline of Digits" in output
    assert "Pipeline: 45 batches" in output
    assert accuracy(output) > 0.7


@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    """Two agents on one host stand for two nodes."""
    address = f"localhost:{free_port()}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    script = [str(EXAMPLES / "digits.py"), "--devices", "1", "--nodes", "2", "--epochs", "1"]
    agents = [
        subprocess.Popen(
            [*agent, *script],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    finally:
        for each in agents:
            each.kill()
    assert [each.returncode for each in agents] == [0, 0], outputs
    assert sum("Pipeline of Digits" in output for output in outputs) == 1
    assert "2 = 2 ranks in a pipeline x 1 replica" in " ".join(" ".join(outputs).split())


@pytest.mark.slow
def test_gpt2_is_tuned_and_exported(tmp_path: Path) -> None:
    output = run(tmp_path, str(EXAMPLES / "gpt2.py"), "--steps", "20")
    assert "exported to gpt2_tuned" in output
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / f"gpt2_tuned{end}") for end in ("_start", ""))
    assert before.state_dict().keys() == after.state_dict().keys()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "gpt2_tuned")("def add_argument(self):")["input_ids"]
    batch = torch.tensor([tokens])
    assert after(batch, labels=batch).loss < before(batch, labels=batch).loss - 0.3


@pytest.mark.feature("Command line and Tuner", "LightningCLI", "works", "a run from a file of options ends")
@pytest.mark.slow
def test_cli(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    words = ("fit", "--config", str(EXAMPLES / "cli.yaml"), "--trainer.max_epochs", "1")
    output = run(tmp_path, str(EXAMPLES / "cli.py"), *words)
    assert "Schedule  gpipe" in output
    assert "batch = 8 micro-batches x 8" in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_notebook(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="a notebook needs nbclient and ipykernel to run")
    pytest.importorskip("ipykernel", reason="a notebook needs a kernel")
    nbformat = pytest.importorskip("nbformat")
    shutil.copy(EXAMPLES / "notebook.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute(env=environment())
    printed = [
        "".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"
    ]
    assert re.search(r"loss \d", printed[1])
    assert re.search(r"loss \d", printed[2])
    assert "stage 1" in printed[3]


@pytest.mark.feature(
    "Optimizers and schedulers",
    'tensor parallelism inside stages (tensor_parallel_size), and parameters in parts (shard_optimizer="parameters")',
    "works",
    "as on one device; a model of Transformers by its own plan",
)
@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_three_dimensions(tmp_path: Path) -> None:
    def losses(stages: int, replicas: int, tensor: int) -> list[float]:
        sizes = {"stages": stages, "replicas": replicas, "tensor": tensor}
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", run(tmp_path, str(script), *words))]

    script = EXAMPLES / "three_dimensions.py"
    alone = losses(1, 1, 1)
    assert len(alone) == 2
    assert losses(2, 1, 2) == pytest.approx(alone, abs=2e-4)
    # replicas see half of the samples each, in steps of twice as many
    assert losses(2, 2, 1)[1] < alone[0]
