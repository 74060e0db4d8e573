"""Plans at the papers' sizes: complete, divided among 4, 8 and 16 ranks, and without a single weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError

from lightning_pipe.partition import find_layers
from recipes import job
from recipes.errors import RecipeError
from recipes.plan import plans
from tests.recipes.conftest import CONF, command
from tests.support.pairs import slow_but

Compose = Callable[..., DictConfig]
PARAMETERS = {
    "amoebanet_imagenet": 566_535_568,  # 557,277,864 and the auxiliary head for images of 480 pixels
    "resnet101_imagenet": 44_549_160,
    "unet_imagenet": 232_687_328,
    "transformer_wikitext103": 5_318_010_112,
    "bert48_wikipedia": 669_790_012,
    "gpt2_wikitext2": 1_389_327_360,
    "gpt2_wikitext103": 1_389_327_360,
    "nmt_multilingual": 6_040_979_968,
}


def test_every_experiment_is_planned_here() -> None:
    assert set(PARAMETERS) == {path.stem for path in (CONF / "experiment").glob("*.yaml")}


@pytest.mark.parametrize(
    ("experiment", "pipe"),
    slow_but(
        [
            ("amoebanet_imagenet", "gpipe"),
            ("bert48_wikipedia", "chimera"),
            ("gpt2_wikitext2", "interleaved"),
            ("gpt2_wikitext103", "chimera"),
            ("nmt_multilingual", "1f1b"),
            ("resnet101_imagenet", "gpipe"),
            ("unet_imagenet", "zero_bubble"),
            ("transformer_wikitext103", "gpipe"),
        ],
        ("bert48_wikipedia", "chimera"),
    ),
)
def test_every_paper_s_model_is_planned_without_a_single_weight(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, experiment: str, pipe: str
) -> None:
    made: list[torch.nn.Module] = []

    def make_module(settings: DictConfig) -> torch.nn.Module:
        made.append(build(settings))
        return made[-1]

    build = job.make_module
    monkeypatch.setattr(job, "make_module", make_module)
    settings = composed(f"experiment={experiment}", "size=paper", f"pipe={pipe}")
    texts = list(plans(settings))
    assert all(tensor.is_meta for tensor in (*made[0].parameters(), *made[0].buffers()))
    assert len(texts) == 3
    for ranks, text in zip((4, 8, 16), texts, strict=True):
        assert f"{PARAMETERS[experiment]:,} parameters" in text
        assert f"{ranks} ranks in a pipeline" in text
        assert re.search(r"predicted bubble \d", text)
        stages = re.findall(r"^│ (\d+) +│", text, re.MULTILINE)
        assert len(stages) == ranks * (2 if pipe == "interleaved" else 1)
        assert "iB" in text


def test_another_schedule_has_micro_batches_of_its_own(composed: Compose) -> None:
    assert composed("experiment=bert48_wikipedia", "size=paper", "pipe=1f1b").pipe.micro_batches == "auto"


@pytest.mark.parametrize(
    ("name", "experiment", "equation"),
    [
        ("bert48_wikipedia", "bert48_wikipedia", "8 (replicas) x 1 (accumulation); batch = 8 micro-batches x 8"),
        *slow_but(
            [
                ("gpipe_w8d4b4", "bert48_wikipedia", "8 (replicas) x 1 (accumulation); batch = 16 micro-batches x 4"),
                ("dapple_w8d4b4", "bert48_wikipedia", "8 (replicas) x 1 (accumulation); batch = 16 micro-batches x 4"),
                ("chimera_w64d8b1", "gpt2_wikitext2", "64 (replicas) x 1 (accumulation); batch = 8 micro-batches x 1"),
                ("dapple_w32d16b1", "gpt2_wikitext2", "32 (replicas) x 1 (accumulation); batch = 16 micro-batches x 1"),
                ("gpipe_w64d8b1", "gpt2_wikitext2", "64 (replicas) x 1 (accumulation); batch = 8 micro-batches x 1"),
            ]
        ),
    ],
)
def test_a_plan_names_the_paper_s_configuration(composed: Compose, name: str, experiment: str, equation: str) -> None:
    settings = composed(f"experiment={experiment}", "size=paper", f"pipe=paper/{name}")
    (text,) = plans(settings)
    assert re.search(rf"Batch +512 samples .* x {re.escape(equation)}\n", text)
    assert f"Schedule  {name.partition('_')[0].replace('dapple', '1f1b').replace('bert48', 'chimera')}" in text
    assert ("Recompute always" in text) == (settings.pipe.recompute == "always")
    layers = {int(number) for number in re.findall(r"\((\d+) layers\)", text)}
    assert len(layers) == 1, "Chimera has as many blocks in every stage"


def test_samples_that_pipelines_cannot_divide_are_refused(composed: Compose) -> None:
    with pytest.raises(InterpolationResolutionError, match="512 samples cannot be divided among 3 pipelines"):
        _ = composed("experiment=bert48_wikipedia", "size=paper", "pipe.data_parallel_size=3").data.batch_size


@pytest.mark.parametrize(
    ("pipe", "micro_batches"),
    slow_but(
        [("pipedream", "1 micro-batch"), ("pipedream_2bw", "4 micro-batches")], ("pipedream_2bw", "4 micro-batches")
    ),
)
def test_without_a_flush_there_is_no_bubble(composed: Compose, pipe: str, micro_batches: str) -> None:
    (text,) = plans(composed("experiment=gpt2_wikitext2", f"pipe={pipe}", "ranks=[4]"))
    assert f"batch = {micro_batches}" in text
    assert "predicted bubble 0.0 %" in text


TOO_FEW_LAYERS = {
    ("bert48_wikipedia", "tiny", 4): 2,
    ("bert48_wikipedia", "tiny", 8): 2,
    ("nmt_multilingual", "tiny", 8): 4,
    ("transformer_wikitext103", "tiny", 8): 6,
}


@pytest.mark.slow  # the papers' sizes are planned above, and one with too few layers below
@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("experiment", sorted(PARAMETERS))
def test_every_size_is_planned(composed: Compose, experiment: str, size: str) -> None:
    texts = list(plans(composed(f"experiment={experiment}", f"size={size}", "ranks=[2,4,8]")))
    for ranks, text in zip((2, 4, 8), texts, strict=True):
        layers = TOO_FEW_LAYERS.get((experiment, size, ranks))
        if layers is None:
            assert f"{ranks} ranks in a pipeline" in text
        else:
            assert f"Use stages={layers} or fewer on {layers} ranks or fewer" in text


@pytest.mark.parametrize("experiment", slow_but(sorted(PARAMETERS), "resnet101_imagenet"))
def test_the_named_layers_are_those_that_are_found_where_the_choice_is_clear(
    composed: Compose, experiment: str
) -> None:
    settings = composed(f"experiment={experiment}", "size=paper")
    with torch.device("meta"):
        module = job.make_module(settings)
    assert find_layers(module, settings.pipe.layers) == find_layers(module)


def test_too_many_ranks_are_told_in_a_sentence(composed: Compose) -> None:
    fits, too_many = plans(composed("experiment=amoebanet_imagenet", "ranks=[4,16]"))
    assert "Pipeline of AmoebaNetClassifier" in fits
    assert too_many.startswith("16 ranks: 9 layers")
    assert "Use stages=9 or fewer on 9 ranks or fewer" in too_many


def test_without_a_schedule_there_is_no_plan(composed: Compose) -> None:
    with pytest.raises(RecipeError, match="pipe=none has no stages"):
        list(plans(composed("experiment=gpt2_wikitext2", "pipe=none")))


def test_the_command_line_writes_nothing(tmp_path: Path) -> None:
    done = command("recipes.plan", tmp_path, ["+experiment=gpt2_wikitext2", "ranks=[2]", "pipe=gpipe"])
    assert not done.value, done.output
    assert done.error is None, done.trace
    assert "Pipeline of GPT2" in done.output
    assert list(tmp_path.iterdir()) == []
