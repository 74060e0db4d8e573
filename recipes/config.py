"""The typed configuration: every key that a recipe understands. Any other is refused with the nearest right one."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from recipes import schemas
from recipes.errors import RecipeError

CONF = Path(__file__).resolve().parents[1] / "conf"
NO_EXPERIMENT = "train"  # what conf/train.yaml calls a recipe, and every experiment otherwise


@dataclass
class Paths:
    """Folders."""

    data: str = MISSING  # downloaded and prepared data, shared by all runs
    output: str = MISSING  # everything that this run writes


@dataclass
class Pipe:
    """Arguments of `lightning_pipe.PipeStrategy`, which documents them; numbers may also be the word "auto"."""

    _target_: str = "lightning_pipe.PipeStrategy"
    schedule: Any = MISSING
    micro_batches: Any = "auto"
    pipeline_parallel_size: Any = "auto"
    data_parallel_size: Any = "auto"
    stages: Any = "auto"
    layers: Any = None
    balance: Any = "parameters"
    recompute: str = "never"
    deferred_batch_norm: bool = True
    save_distributed_checkpoint: bool = False


@dataclass
class Trainer:
    """Arguments of `lightning.Trainer`; strategy, callbacks and loggers come from groups of their own."""

    _target_: str = "lightning.Trainer"
    accelerator: str = "auto"
    devices: Any = 1
    num_nodes: int = 1
    precision: str = "32-true"
    max_epochs: int | None = None
    max_steps: int = -1
    max_time: str | None = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    overfit_batches: Any = 0.0
    fast_dev_run: Any = False
    detect_anomaly: bool = False
    log_every_n_steps: int | None = None
    inference_mode: bool = False  # a metric reset under inference mode cannot be updated by a later fit
    enable_progress_bar: bool = True
    enable_model_summary: bool = False


@dataclass
class Train:
    """The whole configuration of `python -m recipes.train`."""

    recipe: str = MISSING  # names the output folder
    size: str = MISSING  # tiny, small or paper
    ranks: list[int] = field(default_factory=lambda: [4, 8, 16])  # for which `python -m recipes.plan` plans
    seed: int = 1
    threads: int | None = None  # threads per process; None leaves it to torch
    ckpt_path: str | None = None  # resume from a file, or from the newest run's "last" or "best" checkpoint
    paths: Paths = field(default_factory=Paths)
    data: Any = MISSING
    model: Any = MISSING
    optim: Any = MISSING
    scheduler: Any = None
    pipe: Any = None
    trainer: Trainer = field(default_factory=Trainer)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


SCHEMAS: dict[tuple[str, str], type] = {
    ("schema", "train"): Train,
    ("schema/pipe", "strategy"): Pipe,
    **schemas.SCHEMAS,
}


def register() -> None:
    """Makes the schemas known to Hydra; may be called again."""
    store = ConfigStore.instance()
    for (group, name), schema in SCHEMAS.items():
        store.store(group=group, name=name, node=schema)


def check(config: DictConfig) -> None:
    """Refuses keys that nothing reads, which Hydra lets pass when added with ``+``, and data that do not fit the model.

    Args:
        config: a composed configuration.

    Raises:
        RecipeError: names the keys, unknown ones with the nearest known one.
    """
    for path, node in _nodes("", config):
        schema = OmegaConf.get_type(node)
        if is_dataclass(schema):
            known = {item.name for item in fields(schema)}
        elif "_target_" in node:
            parameters = inspect.signature(get_object(node["_target_"])).parameters.values()
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                continue
            known = {parameter.name for parameter in parameters}
        else:
            continue
        for key in map(str, node):
            if key not in known and not re.fullmatch("_[a-z]+_", key):
                raise unknown_key(f"{path}{key}", known)
    _check_that_model_fits_data(config)


def require_experiment(config: DictConfig) -> None:
    """Refuses a command line without an experiment, which would train the default of every group for ever.

    Args:
        config: a composed configuration.
    """
    if config.recipe == NO_EXPERIMENT:
        names = ", ".join(sorted(path.stem for path in CONF.glob("experiment/*.yaml")))
        raise RecipeError("No experiment is chosen.", hint=f"Add one, as experiment=gpt2_wikitext2. There are {names}.")


SHARED = ("vocabulary", "classes", "image_size")


def _check_that_model_fits_data(config: DictConfig) -> None:
    def value(key: str) -> Any:
        return OmegaConf.select(config, key, throw_on_resolution_failure=False)

    for key in SHARED:
        of_model, of_data = value(f"model.{key}"), value(f"data.{key}")
        if None not in (of_model, of_data) and of_model != of_data:
            raise RecipeError(
                f"model.{key}={of_model} and data.{key}={of_data} differ.",
                hint=f"Set data.{key} alone: model.{key} follows it.",
            )
    positions = value("model.positions")
    for key in ("data.block_length", "data.length"):
        length = value(key)
        if None not in (positions, length) and positions < length:
            raise RecipeError(
                f"Samples have up to {key}={length} tokens, the model has {positions} positions.",
                hint=f"Set model.positions={length} or more, or a smaller {key}.",
            )


def _nodes(path: str, node: Any) -> Iterator[tuple[str, DictConfig]]:
    keys: Iterable[Any] = ()
    if isinstance(node, DictConfig):
        yield path, node
        keys = list(node)
    elif isinstance(node, ListConfig):
        keys = range(len(node))
    for key in keys:
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield from _nodes(f"{path}{key}.", node[key])


def unknown_key(path: str, known: Iterable[str]) -> RecipeError:
    """Builds the error for a key that nothing reads.

    Args:
        path: the key with its groups, such as "model.widht".
        known: the keys that exist at that place.

    Example:
        >>> print(unknown_key("model.widht", ["layers", "width"]))
        The configuration has no key model.widht.
        Hint: Did you mean model.width? Known there: layers, width.
    """
    choices = sorted(key for key in known if not key.startswith("_"))
    group, _, key = path.rpartition(".")
    near = difflib.get_close_matches(key, choices, n=1)
    question = f"Did you mean {group}{'.' if group else ''}{near[0]}? " if near else ""
    return RecipeError(f"The configuration has no key {path}.", hint=f"{question}Known there: {', '.join(choices)}.")


def explain(error: BaseException) -> RecipeError:
    """Says in a sentence what is wrong with the command line or a configuration file.

    Args:
        error: what Hydra raised while it composed the configuration.
    """
    text = f"{error}\n{error.__cause__ or ''}"
    key, schema = re.search(r"full_key: (\S+)", text), re.search(r"object_type=(\w+)", text)
    known = {kind.__name__: kind for kind in [*SCHEMAS.values(), Paths, Trainer]}
    if re.search(r"Key '\S+' not in", text) and key and schema and schema[1] in known:
        return unknown_key(key[1], [item.name for item in fields(known[schema[1]])])
    wrong = re.search(r"Value '.*' of type .* could not be converted to \w+|.* is not .*", str(error.__cause__ or ""))
    if wrong and key:
        return RecipeError(f"{key[1]}: {wrong[0]}.", hint="Give a value of that type.")
    return RecipeError(str(error).split("\nConfig search path")[0].rstrip(".") + ".")
