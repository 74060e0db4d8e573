"""Every configuration composes, and a wrong key is refused with the nearest right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_pipe import schedules
from lightning_pipe.schedules import Chimera
from recipes import config
from recipes.errors import RecipeError
from tests.recipes.conftest import CONF
from tests.support.pairs import slow_but

Compose = Callable[..., DictConfig]


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@cache
def of_the_paper(experiment: str) -> DictConfig:
    """The configuration with the paper's size."""
    settings = config.composed(["paths.output=out", f"experiment={experiment}", "size=paper"])
    config.check(settings)
    return settings


@pytest.mark.parametrize("experiment", slow_but(names("experiment"), "resnet101_imagenet"))
def test_another_optimizer_may_take_the_place_of_an_experiment_s(composed: Compose, experiment: str) -> None:
    rate = composed(f"experiment={experiment}").optim.lr
    for optimizer, own, size in (("sgd", "nesterov", "tiny"), ("rmsprop", "decay", "paper")):
        optim = composed(f"experiment={experiment}", f"size={size}", f"optim={optimizer}").optim
        assert own in optim
        assert size == "paper" or optim.lr == rate


def test_another_optimizer_does_not_take_the_arguments_of_an_experiment_s(composed: Compose) -> None:
    with pytest.raises(ConfigCompositionException, match="betas"):
        composed("experiment=gpt2_wikitext2", "optim=sgd", "optim.betas=[0.9,0.99]")


OF_THE_PAPERS = {
    "amoebanet_imagenet": ("gpipe", 16, 4, 1, "always", 128),
    "resnet101_imagenet": ("gpipe", 4, 2, 1, "except_last", 256),
    "unet_imagenet": ("gpipe", 16, 4, 1, "except_last", 512),
    "transformer_wikitext103": ("gpipe", 32, 8, 1, "always", 32),
    "bert48_wikipedia": (Chimera(), 8, 4, 8, "never", 64),
    "gpt2_wikitext2": (Chimera(), 32, 32, 16, "never", 32),
    "gpt2_wikitext103": (Chimera(), 32, 32, 16, "never", 32),
    "nmt_multilingual": ("gpipe", 64, 16, 1, "always", 512),
}
"""Schedule, micro-batches, ranks of a pipeline, pipelines, recomputation, and a pipeline's samples."""


@pytest.mark.parametrize("experiment", slow_but(names("experiment"), "bert48_wikipedia", "gpt2_wikitext2"))
def test_the_paper_s_size_has_the_paper_s_pipeline(experiment: str) -> None:
    settings = of_the_paper(experiment)
    pipe = settings.pipe
    schedule = pipe.schedule if isinstance(pipe.schedule, str) else instantiate(pipe.schedule)
    division = (pipe.micro_batches, pipe.pipeline_parallel_size, pipe.data_parallel_size)
    assert (schedule, *division, pipe.recompute, settings.data.batch_size) == OF_THE_PAPERS[experiment]


OPTIMIZERS = {
    "bert48_wikipedia": ([0.9, 0.999], 1e-6, 0.01),
    "gpt2_wikitext2": ([0.9, 0.999], 1e-8, 0.0),
    "gpt2_wikitext103": ([0.9, 0.999], 1e-8, 0.0),
    "nmt_multilingual": ([0.9, 0.98], 1e-9, 0.0),
    "transformer_wikitext103": ([0.9, 0.98], 1e-9, 0.0),
}
"""Betas, epsilon and weight decay."""


@pytest.mark.parametrize("experiment", slow_but(OPTIMIZERS, "bert48_wikipedia", "gpt2_wikitext2"))
def test_the_papers_optimizers_are_in_the_configuration(experiment: str) -> None:
    optim = of_the_paper(experiment).optim
    assert (optim.betas, optim.eps, optim.weight_decay) == OPTIMIZERS[experiment]


# Experiments and schedules are composed above; what is reproduced is not trained.
CHOICES = [
    [f"{group.name}={name}" for name in names(group.name)]
    for group in sorted(CONF.iterdir())
    if group.is_dir() and group.name not in ("experiment", "pipe", "reproduce", "hparams_search")
]


@pytest.mark.parametrize("choices", list(zip_longest(*CHOICES)))
def test_every_file_composes(composed: Compose, choices: tuple[str | None, ...]) -> None:
    """One of each group together, as a file of one group says nothing about another group."""
    composed(*filter(None, choices))


def test_the_search_of_hyper_parameters_composes(composed: Compose) -> None:
    reason = "make test-extras installs hydra-optuna-sweeper"
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason=reason)
    composed("hparams_search=optuna")


def test_every_file_opens_with_the_command_that_runs_it() -> None:
    for path in CONF.rglob("*.yaml"):
        head = re.match(r"(#.*\n)+", path.read_text())
        assert head is not None, path
        command = "recipes.reproduce" if "reproduce" in path.parts else "recipes.train experiment="
        command += f" {path.stem}" if path.parent.name == "reproduce" else ""
        assert f"python -m {command}" in head[0].replace(" -m experiment", " experiment"), path


def test_an_experiment_must_be_chosen(composed: Compose) -> None:
    config.require_experiment(composed("experiment=gpt2_wikitext2"))
    with pytest.raises(RecipeError, match=r"No experiment.*\n.*There are amoebanet_imagenet, bert48_wikipedia"):
        config.require_experiment(composed())


def test_every_schedule_has_a_file() -> None:
    """All files of the group in one configuration, each at a place of its own."""
    together = [f"+pipe@callbacks.of_{name}={name}" for name in names("pipe") if name != "none"]
    pipes = config.composed(["experiment=gpt2_wikitext2", "trainer=cpu", *together]).callbacks
    made = [instantiate(pipe, _convert_="all") for name, pipe in pipes.items() if name.startswith("of_")]
    families = {strategy.family.name for strategy in made}
    assert families == set(schedules.names())


def test_schedules_have_options(composed: Compose) -> None:
    settings = composed("experiment=gpt2_wikitext2", "pipe=chimera", "pipe.schedule.scaling=forward_doubling")
    assert instantiate(settings.pipe.schedule) == Chimera(pipes=2, scaling="forward_doubling")
    with pytest.raises(RecipeError, match=r"no key pipe\.schedule\.scalign"):
        composed("pipe=chimera", "+pipe.schedule.scalign=direct")


def test_debug_and_hardware_win_over_the_experiment(composed: Compose) -> None:
    settings = composed("experiment=gpt2_wikitext2", "debug=one_device", "trainer=cpu")
    assert settings.pipe is None
    assert settings.trainer.devices == 1
    assert settings.trainer.accelerator == "cpu"
    assert settings.threads == 1


@pytest.mark.parametrize(
    ("override", "place", "suggestion"),
    slow_but(
        [
            ("model.widht=3", "model.widht", "model.width"),
            ("+model.widht=3", "model.widht", "model.width"),
            ("modle.width=3", "modle", "model"),
            ("+callbacks.checkpoint.save_topk=3", "callbacks.checkpoint.save_topk", "callbacks.checkpoint.save_top_k"),
            ("paths.outptu=3", "paths.outptu", "paths.output"),
        ],
        ("+model.widht=3", "model.widht", "model.width"),
        ("modle.width=3", "modle", "model"),
    ),
)
def test_an_unknown_key_is_refused_with_the_nearest(
    composed: Compose, override: str, place: str, suggestion: str
) -> None:
    with pytest.raises((RecipeError, ConfigCompositionException)) as caught:
        composed(override)
    error = caught.value if isinstance(caught.value, RecipeError) else config.explain(caught.value)
    assert f"no key {place}." in error.message
    assert error.hint is not None
    assert f"Did you mean {suggestion}?" in error.hint


@pytest.mark.parametrize(
    ("experiment", "override", "words"),
    [
        *slow_but(
            [
                ("gpt2_wikitext2", "model.vocabulary=100", r"model\.vocabulary=100 and data\.vocabulary=2048 differ"),
                ("nmt_multilingual", "data.length=65", r"data\.length=65 tokens, the model has 32 positions"),
            ]
        ),
        ("amoebanet_imagenet", "model.image_size=64", r"model\.image_size=64 and data\.image_size=32 differ"),
        ("gpt2_wikitext2", "model.positions=32", r"data\.block_length=128 tokens, the model has 32 positions"),
    ],
)
def test_a_model_that_its_data_do_not_fit_is_refused(
    composed: Compose, experiment: str, override: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        composed(f"experiment={experiment}", override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.width=wide", "model.width: Value 'wide' of type 'str' could not be converted to Integer"),
        ("data.batch_size=null", "data.batch_size: field 'data.batch_size' is not Optional"),
        ("model=gpt3", "Could not find 'model/gpt3'"),
        ("experiment=gpt", "gpt2_wikitext2"),
        (
            "callbacks.early_stopping.patience=3",
            "callbacks.early_stopping.\nHint: callbacks=early_stopping adds it.",
        ),
    ],
)
def test_a_wrong_value_is_explained(composed: Compose, override: str, words: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(override)
    assert words in str(config.explain(caught.value))


def test_a_typing_error_in_a_file_is_explained(composed: Compose, tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\nmodel:\n  widht: 7\n")
    with pytest.raises(ConfigCompositionException) as caught:
        composed("experiment=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert "Did you mean model.width?" in str(config.explain(caught.value))


@pytest.mark.parametrize("name", slow_but(names("debug"), "fast"))
def test_every_debug_run_has_a_folder_that_no_other_run_looks_into(name: str) -> None:
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("train", ["experiment=gpt2_wikitext2", f"debug={name}"], return_hydra_config=True)
    folder = OmegaConf.to_container(made.hydra.run, resolve=False)["dir"]
    assert folder.startswith("outputs/debug/${recipe}/")


def test_settings_of_one_machine_are_added(tmp_path: Path) -> None:
    config.register()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\npaths:\n  data: /mine\n")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("train", ["experiment=gpt2_wikitext2", f"hydra.searchpath=[file://{tmp_path}]"])
    assert made.paths.data == "/mine"
