"""Weights from files by name, each rank its own."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.construction import place_meta, safetensors_file, unread, unread_tensor
from lightning_pipe.errors import CheckpointError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.local_parts import is_divided, local, share, with_local
from lightning_pipe.parameters.releasing import named_tensors

_LIGHTNINGS = "state_dict"
"""Where Lightning's checkpoints hold the module, and its folders of shards by ModelParallelStrategy."""
_SHARDED = "model"
"""Where folders of shards by FSDPStrategy and this package hold it, beside a file ``meta.pt``."""

Sources = Mapping[str, Callable[[], Tensor]]
"""For the name of each tensor what gives it; it is read when its value is needed."""


class Differences(NamedTuple):
    """Names that only a module or only its files have.

    Args:
        missing: parameters and buffers that the files lack under all of their names.
        unexpected: what the files have besides.
    """

    missing: list[str]
    unexpected: list[str]


def load_held(module: nn.Module, holds: Callable[[str], bool], state: Mapping[str, Any], *, strict: bool) -> None:
    """Load what this rank holds from the state of a whole module.

    Args:
        module: the divided module.
        holds: whether this rank has the true value of a named parameter or buffer.
        state: of the whole module.
        strict: whether different names are an error.

    Raises:
        RuntimeError: names differ, as from torch.
    """
    foreign = {name for name, _ in named_tensors(module) if not holds(name)}
    parts = {name: tensor for name, tensor in named_tensors(module) if is_divided(tensor)}
    own = {key: value for key, value in state.items() if key not in foreign}
    own.update({key: with_local(share(own[key], parts[key]), parts[key]) for key in own.keys() & parts.keys()})
    result = module.load_state_dict(own, strict=False)
    missing = [key for key in result.missing_keys if key not in foreign or key not in state]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    problems += [f"unexpected {', '.join(result.unexpected_keys)}"] if result.unexpected_keys else []
    if strict and problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {'; '.join(problems)}.")


def load_weights(
    module: nn.Module, path: str | os.PathLike[str], *, prefix: str = "", strict: bool = True
) -> Differences:
    """Load parameters and buffers by name; a rank reads those alone that it holds, one after the other.

    It works before the layers are divided over the ranks (in ``configure_model``, in ``with trainer.init_module():``,
    also on the meta device) and afterwards, in hooks. Values take the dtype and the device of the parameter.

    Args:
        module: the LightningModule, or a part of it.
        path: a folder of safetensors, with an index or without; a folder of ``torch.distributed.checkpoint``, such as
            ``save_distributed_checkpoint=True`` writes; one file of safetensors or of ``torch.save``.
        prefix: what the names of the module's tensors have before them in the files.
        strict: whether different names are an error.

    Returns:
        The names that only one of them has.

    Raises:
        CheckpointError: names or shapes differ, or the path is something else.

    Example:
        >>> import tempfile
        >>> layer, same = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(layer.state_dict(), f"{folder}/layer.pt")
        ...     load_weights(same, f"{folder}/layer.pt")
        Differences(missing=[], unexpected=[])
    """
    place_meta(module)
    sources = {
        name.removeprefix(prefix): read for name, read in _sources(Path(path)).items() if name.startswith(prefix)
    }
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    known = {id(tensor) for name, tensor in tensors.items() if name in sources}
    differences = Differences(
        [name for name, tensor in tensors.items() if id(tensor) not in known],
        [name for name in sources if name not in tensors],
    )
    named = {"missing": differences.missing, "unexpected": differences.unexpected}
    problems = [f"{what} {', '.join(names)}" for what, names in named.items() if names]
    if strict and problems:
        raise CheckpointError(
            f"{path} does not fit {type(module).__name__}: {'; '.join(problems)}.",
            hint="Give the prefix of the names in the files, or strict=False.",
        )
    own = {id(tensor): name for name, tensor in tensors.items() if name in sources and not is_absent(tensor)}
    with torch.no_grad():
        for name in own.values():  # what has several names once
            _fill(name, tensors[name], sources[name]())
    return differences


def _fill(name: str, tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        raise CheckpointError(f"'{name}' is {tuple(tensor.shape)} in the module and {tuple(value.shape)} in the file.")
    local(tensor).copy_(share(value, tensor))


def _sources(path: Path) -> Sources:
    if (path / ".metadata").is_file():
        return _of_distributed(path)
    files = list(_files(path))
    if not files:
        raise CheckpointError(
            f"{path} holds no weights: it is no file, and no folder of safetensors or of torch.distributed.checkpoint."
        )
    return {name: read for file in files for name, read in _of_file(file).items()}


def _files(path: Path) -> Iterator[Path]:
    """The files that belong together: those of an index if there is one."""
    if path.is_file():
        yield path
    elif index := next(path.glob("*.safetensors.index.json"), None):
        yield from (path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values())))
    elif (path / "model.safetensors").is_file():
        yield path / "model.safetensors"
    else:
        yield from sorted(path.glob("*.safetensors"))


def _of_file(path: Path) -> Sources:
    if path.suffix == ".safetensors":
        file = safetensors_file(path)
        return {name: functools.partial(file.get_tensor, name) for name in file.offset_keys()}
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    state = unread(loaded.get(_LIGHTNINGS, loaded))
    return {name: functools.partial(state.get, name) for name in state if isinstance(state[name], Tensor)}


def _of_distributed(path: Path) -> Sources:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    like = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    whose = [_LIGHTNINGS, *([_SHARDED] if (path / "meta.pt").is_file() else [])]
    inside = next((f"{each}." for each in whose if any(name.startswith(f"{each}.") for name in like)), "")
    names = [name for name in like if name.startswith(inside)]
    return {
        name.removeprefix(inside): functools.partial(unread_tensor, like[name], functools.partial(_read, path, name))
        for name in names
    }


def _read(path: Path, name: str, place: Tensor) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load({name: place}, checkpoint_id=path, no_dist=True)
