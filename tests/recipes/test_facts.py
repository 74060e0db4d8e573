"""What a run tells its loggers, and where it looks for settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes import checkpoints, command_line, facts, job
from recipes.errors import RecipeError
from tests.recipes.conftest import CONF

Compose = Callable[..., DictConfig]
SMALL = ["experiment=gpt2_wikitext2", "model.width=36", "logger=none", "trainer.enable_progress_bar=false"]


def test_loggers_get_configuration_schedule_and_plan(composed: Compose) -> None:
    settings = composed(*SMALL, "pipe=chimera", "tags=[mine]")
    module = job.make_module(settings)
    told = facts.facts(settings, module, job.make_trainer(settings, []))
    assert told["config"]["model"]["width"] == 36
    assert told["config"]["tags"] == ["mine"]
    assert told["schedule"] == "chimera"
    assert "Pipeline of GPT2" in told["plan"]
    assert told["parameters"] == sum(parameter.numel() for parameter in module.parameters())


def test_the_configuration_is_shown_where_that_is_wanted(composed: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    for wanted in (False, True):
        settings = composed(*SMALL, f"extras.print_config={wanted}", "pipe=none", "trainer.devices=1")
        module = job.make_module(settings)
        facts.tell(settings, module, job.make_trainer(settings, []))
        assert ("  width: 36" in capsys.readouterr().out) is wanted


def test_a_checkpoint_of_another_configuration_is_told(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(composed(*SMALL), resolve=True))
    checkpoint = str(tmp_path / "checkpoints" / "last.ckpt")
    assert checkpoints.differences(None, composed(*SMALL)) == []
    assert checkpoints.differences(checkpoint, composed(*SMALL, "trainer.max_epochs=7", "paths.data=x")) == []
    changed = composed(*SMALL, "optim.lr=0.5", "model.dropout=0.3")
    assert checkpoints.differences(checkpoint, changed) == [
        "model.dropout=0.0 then, model.dropout=0.3 now",
        "optim.lr=0.0015 then, optim.lr=0.5 now",
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "debug").glob("*.yaml")))
def test_every_debug_run_has_a_folder_that_no_other_run_looks_into(name: str) -> None:
    from recipes import config

    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("train", ["experiment=gpt2_wikitext2", f"debug={name}"], return_hydra_config=True)
    folder = OmegaConf.to_container(made.hydra.run, resolve=False)["dir"]
    assert folder.startswith("outputs/debug/${recipe}/")


def test_variables_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_BEFORE", "1")
    monkeypatch.delenv("FROM_FILE", raising=False)
    command_line.load_environment()
    (tmp_path / ".env").write_text("FROM_FILE=2\nSET_BEFORE=3\n")
    monkeypatch.setitem(__import__("sys").modules, "dotenv", None)
    with pytest.raises(RecipeError, match="python-dotenv"):
        command_line.load_environment()
    monkeypatch.undo()
    pytest.importorskip("dotenv", reason="make test-extras installs python-dotenv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_BEFORE", "1")
    command_line.load_environment()
    assert (os.environ.pop("FROM_FILE"), os.environ["SET_BEFORE"]) == ("2", "1")


def test_settings_of_one_machine_are_added(tmp_path: Path) -> None:
    from recipes import config

    config.register()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\npaths:\n  data: /mine\n")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("train", ["experiment=gpt2_wikitext2", f"hydra.searchpath=[file://{tmp_path}]"])
    assert made.paths.data == "/mine"
