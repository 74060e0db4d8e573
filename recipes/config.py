"""The typed configuration: every key that a recipe understands. Any other is refused with the nearest right one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from recipes import arguments
from recipes.errors import RecipeError

CONF = Path(__file__).resolve().parents[1] / "conf"
NO_EXPERIMENT = "train"  # what conf/train.yaml calls a recipe, and every experiment otherwise


@dataclass
class Paths:
    """Folders."""

    data: str = MISSING  # downloaded and prepared data, shared by all runs
    output: str = MISSING  # everything that this run writes


@dataclass
class Train:
    """The whole configuration of `python -m recipes.train`."""

    recipe: str = MISSING  # names the output folder
    size: str = MISSING  # tiny, small or paper
    ranks: list[int] | None = None  # for which `python -m recipes.plan` plans: those of the pipe, or 4, 8 and 16
    seed: int = 1
    tags: list[str] = field(default_factory=list)  # words to find the run by, in summary.json and with every logger
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of optim=adamw: a size may have its own
    optimized_metric: str = "val_loss"  # what a run returns, for searches of hyper-parameters
    test: bool = True  # after training, where a recipe has a test
    threads: int | None = None  # threads per process; None leaves it to torch
    ckpt_path: str | None = None  # resume from a file, or from the newest run's "last" or "best" checkpoint
    transfer: bool = False  # take the weights of ckpt_path alone, and a new head: fine-tunes for other classes
    layers: Any = None  # dotted names of the model's layers, which the stages are cut from
    compile: str | None = None  # a backend of torch.compile, such as inductor, for each layer
    balance: Any = "parameters"  # what stages get equal amounts of, for this model
    paths: Paths = field(default_factory=Paths)
    data: Any = MISSING
    model: Any = MISSING
    optim: Any = MISSING
    scheduler: Any = None
    pipe: Any = None
    trainer: Any = MISSING
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Makes the schemas, ``${output:}`` and ``${per_pipeline:}`` known to Hydra; may be called again."""
    OmegaConf.register_new_resolver("output", output_folder, replace=True)
    OmegaConf.register_new_resolver("per_pipeline", per_pipeline, replace=True)
    ConfigStore.instance().store(group="schema", name="train", node=Train)
    arguments.register()


def composed(overrides: Iterable[str], name: str = "train", folder: Path = CONF) -> DictConfig:
    """What the files of a folder say, outside a command of Hydra's.

    Args:
        overrides: in Hydra's form, as ``model.layers=4``.
        name: of the root file.
        folder: with the files.
    """
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(name, list(overrides))


def output_folder() -> str:
    """The folder of this run. ``--cfg`` runs nothing: it shows the folder that a run would have."""
    hydra = HydraConfig.get()
    return str(hydra.run.dir if OmegaConf.is_missing(hydra.runtime, "output_dir") else hydra.runtime.output_dir)


def per_pipeline(total: int, *, _root_: DictConfig) -> int:
    """A pipeline's samples of so many in a step, where the number of pipelines side by side is given."""
    pipelines = _root_.pipe.data_parallel_size if _root_.pipe else "auto"
    if not isinstance(pipelines, int):
        return total
    if total % pipelines:
        raise RecipeError(
            f"{total} samples cannot be divided among {pipelines} pipelines.", hint="Set data.batch_size."
        )
    return total // pipelines


def check(config: DictConfig) -> None:
    """Refuses keys that nothing reads, which Hydra lets pass when added with ``+``, and data that do not fit the model.

    Args:
        config: a composed configuration.

    Raises:
        RecipeError: names the keys, unknown ones with the nearest known one.
    """
    for path, node in _nodes("", config):
        known = _known(path, node)
        if known is not None:
            for key in map(str, node):
                if key not in known and not re.fullmatch("_[a-z]+_", key):
                    raise unknown_key(f"{path}{key}", known, _taken(node))
            _check_words(path, node)
        _check_duration(path, node)
    _check_that_model_fits_data(config)


def _known(path: str, node: DictConfig) -> Iterable[str] | None:
    """The keys of a node; ``None`` where any key is one."""
    if "_target_" not in node:
        schema = OmegaConf.get_type(node)
        return [item.name for item in fields(schema)] if is_dataclass(schema) else None
    target, partial = node["_target_"], "_partial_" in node and node["_partial_"]
    try:
        return None if arguments.takes_any(target) else arguments.parameters(target, partial=partial)
    except (ImportError, InstantiationException) as error:
        raise RecipeError(f"{path}_target_: {target} cannot be imported.", hint="Correct its name.") from error
    except (ValueError, TypeError):  # builtins, and what is no callable, have no signature
        return None


def _check_duration(path: str, node: DictConfig) -> None:
    """Refuses two units: what is given comes beside the default's seconds, and the sum is hardly meant."""
    if "_target_" not in node or node["_target_"] != "datetime.timedelta":
        return
    units = [f"{unit!s}={value}" for unit, value in node.items() if value and not str(unit).startswith("_")]
    if len(units) > 1:
        place = path.rstrip(".")
        raise RecipeError(f"{place} would be the sum of {' and '.join(units)}.", hint=f"Set {place}.seconds alone.")


def _taken(node: Any) -> dict[str, str]:
    return arguments.taken(node["_target_"]) if isinstance(node, DictConfig) and "_target_" in node else {}


def _check_words(path: str, node: DictConfig) -> None:
    """Refuses a word that an argument's `Literal` does not have."""
    if "_target_" not in node:
        return
    for key, argument in arguments.signature(node["_target_"]).items():
        hint = argument.annotation
        known = None if key not in node or OmegaConf.is_missing(node, key) else arguments.words(hint)
        only = get_origin(hint) is Literal  # elsewhere what is no word may be of another type
        if known and (only or isinstance(node[key], str)) and node[key] not in (get_args(hint) if only else known):
            near = difflib.get_close_matches(str(node[key]), known, n=1)
            question = f"Did you mean {near[0]}? " if near else ""
            raise RecipeError(f"{path}{key}={node[key]} is unknown.", hint=f"{question}There are {', '.join(known)}.")


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


def unknown_key(path: str, known: Iterable[str], taken: Mapping[str, str] | None = None) -> RecipeError:
    """Builds the error for a key that nothing reads.

    Args:
        path: the key with its groups, such as "model.widht".
        known: the keys that exist at that place.
        taken: arguments that are no keys, with what chooses them.

    Example:
        >>> print(unknown_key("model.widht", ["layers", "width"]))
        The configuration has no key model.widht.
        Hint: Did you mean model.width? Known there: layers, width.
    """
    choices = sorted(key for key in known if not key.startswith("_"))
    group, _, key = path.rpartition(".")
    near = difflib.get_close_matches(key, choices, n=1)
    ways = [f"Did you mean {group}{'.' if group else ''}{near[0]}?"] if near else []
    if taken and key in taken:
        hint = f"{taken[key]} chooses it."
    elif not choices and (CONF / group).is_dir():
        hint = f"Choose another one than {group}=none."
    else:
        ways = [f"{group}={key} adds it."] if group and (CONF / group / f"{key}.yaml").exists() else ways
        hint = " ".join([*ways, f"Known there: {', '.join(choices)}."])
    return RecipeError(f"The configuration has no key {path}.", hint=hint)


def explain(error: BaseException) -> RecipeError:
    """Says in a sentence what is wrong with the command line or a configuration file.

    Args:
        error: what Hydra raised while it composed the configuration.
    """
    cause = next(
        (one for one in (error, error.__cause__, error.__context__) if isinstance(one, OmegaConfBaseException)), None
    )
    key, node = getattr(cause, "full_key", None), getattr(cause, "parent_node", None)
    if key and isinstance(node, DictConfig) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        schema = OmegaConf.get_type(node)
        known = [item.name for item in fields(schema)] if is_dataclass(schema) else map(str, node)
        return unknown_key(key, known, _taken(node))
    wrong = re.search(r"Value '.*' of type .* could not be converted to \w+|.* is not .*", str(cause or ""))
    if wrong and key:
        return RecipeError(f"{key}: {wrong[0]}.", hint="Give a value of that type.")
    return RecipeError(str(error).split("\nConfig search path")[0].rstrip(".") + ".")
