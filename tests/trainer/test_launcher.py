"""How the other processes of a run are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pipe.trainer.connect import RUN

SCRIPT = """
import hydra, lightning as L, lightning_pipe
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=None)
def main(config):
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="pipe", logger=False, max_epochs=1,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    from tests.support.lit_modules import Data, Lit
    trainer.fit(Lit().double(), datamodule=Data())
    folder = HydraConfig.get().runtime.output_dir
    with open(f"{folder}/{config.lr}_process_{trainer.global_rank}_of_{trainer.world_size}", "w"):
        pass

main()
"""
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", RUN)


def clean_environment() -> dict[str, str]:
    """Without the variables that a Trainer leaves in its process: with them a script would wait for a launcher."""
    left = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return left | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def hydra_script(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *words]
    environment = clean_environment()
    return subprocess.run(command, timeout=110, env=environment, cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.slow
def test_a_job_of_hydra_starts_its_processes_in_its_folder(tmp_path: Path) -> None:
    ended = hydra_script(tmp_path, "train.py", "+lr=3", f"hydra.run.dir={tmp_path}/out")
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("*of_2")) == ["3_process_0_of_2", "3_process_1_of_2"]


def test_a_sweep_of_hydra_says_how_to_start_it(tmp_path: Path) -> None:
    ended = hydra_script(tmp_path, "train.py", "-m", "+lr=1,2", f"hydra.sweep.dir={tmp_path}/out")
    assert ended.returncode == 1
    assert "torchrun --standalone --nproc-per-node 2 train.py -m" in ended.stderr


@pytest.mark.slow
def test_a_sweep_by_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = hydra_script(tmp_path, *torchrun, "train.py", "-m", "+lr=1,2", f"hydra.sweep.dir={tmp_path}/out")
    assert ended.returncode == 0, ended.stderr
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("*/*of_2"))
    assert found == [f"{job}/{job + 1}_process_{rank}_of_2" for job in (0, 1) for rank in (0, 1)]
