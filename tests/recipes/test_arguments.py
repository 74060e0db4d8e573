"""Keys follow signatures: every argument is a key, and every key an argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from hydra.errors import ConfigCompositionException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from recipes import arguments, config, models
from recipes.errors import RecipeError
from recipes.modules.amoebanet import AmoebaNetClassifier
from recipes.modules.bert import BERT
from recipes.modules.gpipe_transformer import TransformerLM
from recipes.modules.gpt2 import GPT2
from recipes.modules.nmt import Translator
from recipes.modules.resnet import ResNetClassifier
from recipes.modules.unet import Denoiser
from tests.recipes.conftest import CONF
from tests.support.pairs import slow_but

Compose = Callable[..., DictConfig]
NAMED = re.compile(r"^  - /(arguments|factory)/(\S+)@", re.MULTILINE)
NAMES = sorted({pair for path in CONF.rglob("*.yaml") for pair in NAMED.findall(path.read_text())})


@pytest.mark.parametrize(("kind", "target"), NAMES)
def test_every_argument_is_a_key_and_every_key_an_argument(kind: str, target: str) -> None:
    partial = kind == arguments.FACTORY
    node = OmegaConf.structured(arguments.schema(target, partial=partial))
    every = inspect.signature(get_object(target)).parameters
    given = {name: one for name, one in every.items() if one.kind is not one.VAR_KEYWORD}
    completed = {name for name, one in given.items() if partial and one.default is one.empty}
    assert set(node) - {"_target_", "_partial_"} == set(given) - completed - set(arguments.taken(target))
    for name, one in given.items():
        if name in node and one.default is not one.empty:
            assert node[name] == arguments.plain(one.default), name


def test_what_the_recipe_gives_itself_is_an_argument() -> None:
    for target, taken in arguments.TAKEN.items():
        assert set(taken) <= set(inspect.signature(get_object(target)).parameters)


@pytest.mark.parametrize("plus", slow_but(["", "++"], ""))
def test_what_is_an_argument_can_be_set(composed: Compose, plus: str) -> None:
    given = {
        "pipe.shard_optimizer": True,
        "pipe.timeout.seconds": 20.0,
        "pipe.loss_weight": "sum",
        "pipe.split_batch": "{_target_: hydra.utils.get_method, path: os.path.join}",
        "pipe.process_group_backend": "gloo",
        "trainer.sync_batchnorm": True,
        "trainer.gradient_clip_algorithm": "value",
        "trainer.deterministic": True,
        "trainer.profiler": "{_target_: lightning.pytorch.profilers.SimpleProfiler}",
        "trainer.max_time": "{minutes: 5}",
        "optim.amsgrad": True,
        "callbacks.checkpoint.every_n_train_steps": 50,
    }
    settings = composed("experiment=gpt2_wikitext2", *(f"{plus}{key}={value}" for key, value in given.items()))
    for key, value in given.items():
        found = OmegaConf.select(settings, key)
        assert str(found).replace("'", "") == value if "{" in str(value) else found == value, key


def test_what_a_configuration_has_no_words_for_is_a_node(composed: Compose) -> None:
    assert instantiate(composed("experiment=gpt2_wikitext2").pipe.timeout) == timedelta(minutes=30)
    settings = composed("experiment=gpt2_wikitext2", "pipe.timeout.seconds=20")
    assert instantiate(settings.pipe.timeout) == timedelta(seconds=20)
    with pytest.raises(RecipeError, match=r"sum of seconds=1800.0 and minutes=5.*\n.*pipe\.timeout\.seconds alone"):
        composed("experiment=gpt2_wikitext2", "++pipe.timeout={_target_: datetime.timedelta, minutes: 5}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.strategy=ddp", r"no key trainer\.strategy\.\nHint: pipe=… chooses it"),
        ("+trainer.logger=false", "logger=… chooses it"),
        ("pipe.precision_plugin=null", "trainer.precision=… chooses it"),
    ],
)
def test_what_the_recipe_gives_itself_is_no_key(composed: Compose, override: str, words: str) -> None:
    with pytest.raises((RecipeError, ConfigCompositionException)) as caught:
        composed("experiment=gpt2_wikitext2", override)
    error = caught.value if isinstance(caught.value, RecipeError) else config.explain(caught.value)
    assert re.search(words, str(error))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pipe=chimera", "pipe.schedule.scaling=none"], r"pipe\.schedule\.scaling=none is unknown"),
        (["++model._target_=recipes.modules.gpt3.GPT3"], r"model\._target_: .*gpt3"),
        *slow_but(
            [
                (["experiment=amoebanet_imagenet", "model.network=e"], r"model\.network=e is unknown.*There are b, d"),
                (["pipe.recompute=alway"], r"pipe\.recompute=alway is unknown.*Did you mean always\?"),
            ]
        ),
    ],
)
def test_a_word_that_an_argument_does_not_have_is_refused(composed: Compose, overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=re.compile(words, re.DOTALL)):
        composed("experiment=gpt2_wikitext2", *overrides)


@pytest.mark.parametrize(
    ("module", "network", "given", "own"),
    [
        (GPT2, models.gpt2, set(), set()),
        (BERT, models.bert, set(), set()),
        (TransformerLM, models.GPipeTransformer, set(), {"positions"}),
        (Translator, models.NMTTransformer, set(), {"positions", "label_smoothing"}),
        (ResNetClassifier, models.resnet101, {"classes"}, {"classes", "image_size", "label_smoothing"}),
        (Denoiser, models.UNet, {"inputs", "outputs"}, {"image_size"}),
        (
            AmoebaNetClassifier,
            models.AmoebaNet,
            {"classes", "auxiliary_for"},
            {"classes", "image_size", "label_smoothing", "auxiliary_weight", "drop_path"},
        ),
    ],
)
def test_a_hyper_parameter_of_a_network_is_an_argument_of_its_module(
    module: type, network: Callable[..., object], given: set[str], own: set[str]
) -> None:
    whole, parts = (inspect.signature(one).parameters for one in (module, network))
    passed = parts.keys() - given
    assert [whole[name].default for name in passed] == [parts[name].default for name in passed]
    assert whole.keys() - passed == {"weight_decay"} | own


def test_a_subclass_has_a_signature_of_its_own() -> None:
    class Own(GPT2):
        def __init__(self, layers: int) -> None:
            super().__init__(layers=layers)

    assert list(inspect.signature(Own).parameters) == ["layers"]
