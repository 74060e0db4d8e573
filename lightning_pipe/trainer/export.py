"""``save_pretrained`` of a divided Hugging Face model: each rank writes the weights that it holds.

Transformers itself writes on every rank, into a folder of that rank's own: it knows what belongs into the files, such
as names of older versions. Then the files get the names of shards of one model, and process 0 writes the index::

    process 0   .part/0/model.safetensors, config.json   ->   model-00002-of-00002.safetensors, config.json, index
    process 1   .part/1/model.safetensors                ->   model-00001-of-00002.safetensors
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CheckpointError, ConfigurationError
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.checkpoints.rank_entries import receive_piece, send_piece
from lightning_pipe.transport.base import Transport

_METHOD = "save_pretrained"
_TAG = (1 << 24) - 2
_PIECE = 16 << 20
_SUFFIX = ".safetensors"
_NUMBERED = re.compile(r"(.+)-\d{5}-of-\d{5}")


class Shard(NamedTuple):
    """A file with some of the weights.

    Args:
        base: its name without numbers and ending.
        keys: names of its tensors.
        size: bytes of its tensors.
        path: where it lies, on its rank.
    """

    base: str
    keys: tuple[str, ...]
    size: int
    path: str


class SavePretrained:
    """Stands in the place of the method while a model is divided. Collective: called on all ranks.

    Args:
        model: the Hugging Face model.
        prefix: what stands before the names of its parameters in the LightningModule.
        pipeline: the LightningModule over the ranks.
        meet: waits for all processes, and raises where they cannot come.
    """

    def __init__(self, model: Any, prefix: str, pipeline: Pipeline, meet: Callable[[str], None]) -> None:
        self._model, self._prefix, self._pipeline, self._meet = model, prefix, pipeline, meet

    def __deepcopy__(self, memo: dict[int, Any]) -> SavePretrained:
        """Of a copied model: averages of the weights are divided in the same way."""
        return SavePretrained(memo.get(id(self._model), self._model), self._prefix, self._pipeline, self._meet)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write the model into a folder.

        Args:
            save_directory: the folder; other files in it stay.
            options: those of Transformers, as far as they concern files on this machine.

        Raises:
            ConfigurationError: an option is not supported.
            CheckpointError: the folder cannot be written.
        """
        self._check(options)
        self._meet(f"{_METHOD}()")
        folder, transport = os.fspath(save_directory), self._pipeline.transport
        writes = transport.process == 0
        with _part(folder, transport) as (part, shared):
            shards = self._written(part, options, writes=writes) if transport.replica == 0 else []
            if not shared:
                shards = _streamed(shards, part, transport)
            everyone, order = tuple(range(transport.topology.world_size)), transport.topology.pipeline_processes(0)
            gathered: list[list[Shard]] = transport.all_gather_object(shards, everyone)
            if writes:
                _publish(folder, part, [shard for p in order for shard in gathered[p]], self._index(options))
            transport.barrier()

    def _check(self, options: dict[str, Any]) -> None:
        refused = [name for name in ("push_to_hub", "distributed_checkpoint", "state_dict") if options.get(name)]
        if getattr(self._model, "peft_config", None):
            refused.append("an adapter of PEFT")
        if refused:
            raise ConfigurationError(
                f"{_METHOD}() of a model that is divided over the ranks does not support {', '.join(refused)}.",
                hint="Save the folder and upload it with huggingface_hub, or let every rank hold the whole model after "
                "fit: trainer.strategy.whole_module()",
            )

    def _written(self, part: str, options: dict[str, Any], *, writes: bool) -> list[Shard]:
        """Let Transformers write what this rank counts; process 0 also writes all that is no weight."""
        counted = self._pipeline.ownership.counted
        state = {key: value for key, value in self._model.state_dict().items() if counted(f"{self._prefix}{key}")}
        if not state and not writes:
            return []
        options = {**options, "is_main_process": True, "state_dict": state}
        with _on_this_rank(self._model):
            type(self._model).save_pretrained(self._model, part, **options)
        shards = [shard for path in sorted(Path(part).glob(f"*{_SUFFIX}")) if (shard := _shard(path)).keys]
        if state and not shards:
            raise CheckpointError(
                f"Transformers has written none of {len(state)} weights of {self._pipeline.transport.describe()}.",
                hint="Save a checkpoint of Lightning instead: trainer.save_checkpoint(), on all ranks.",
            )
        return shards

    def _index(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"variant": options.get("variant"), "parameters": self._model.num_parameters()}


def _on_this_rank(model: Any) -> AbstractContextManager[None]:
    """Transformers (5.23) writes on the first process of torch.distributed alone, whatever it is told."""
    name = "should_save_on_this_rank"
    return replaced(model, name, lambda is_main_process: is_main_process) if hasattr(model, name) else nullcontext()


@contextmanager
def _part(folder: str, transport: Transport) -> Iterator[tuple[str, bool]]:
    """This rank's folder: within the one that is asked for, if all processes see what process 0 has made there.

    Yields:
        The folder, and whether all processes see it. It is gone afterwards.
    """
    everyone = tuple(range(transport.topology.world_size))
    beside, error = os.path.join(folder, f".lightning-pipe-{uuid.uuid4().hex}.part"), ""
    if transport.process == 0:
        try:
            os.makedirs(beside)
        except OSError as reason:
            error = reason.strerror or str(reason)
    beside, error = transport.broadcast_object((beside, error), 0, everyone)
    if error:
        raise CheckpointError(f"{folder} cannot be written: {error}.")
    try:
        shared = all(transport.all_gather_object(sees(beside), everyone))
        if shared or transport.process == 0:
            path = os.path.join(beside, str(transport.process))
            os.mkdir(path)
            yield path, shared
        else:
            with tempfile.TemporaryDirectory(prefix="lightning-pipe-") as path:
                yield path, shared
    finally:
        if transport.process == 0:
            shutil.rmtree(beside, ignore_errors=True)


def sees(path: str) -> bool:
    """Whether a folder of process 0 is there for this process, too."""
    return os.path.isdir(path)


def _shard(path: Path) -> Shard:
    """A file, by its header: eight bytes with the length of a dictionary that follows."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    numbered = _NUMBERED.fullmatch(path.name.removesuffix(_SUFFIX))
    base = numbered[1] if numbered else path.name.removesuffix(_SUFFIX)
    size = sum(end - start for start, end in (entry["data_offsets"] for entry in header.values()))
    return Shard(base, tuple(header), size, str(path))


def _publish(folder: str, part: str, shards: list[Shard], index: dict[str, Any]) -> None:
    """Put the files into their places, the index last; shards of an earlier export go."""
    if not shards:
        raise CheckpointError(f"There are no weights to write into {folder}.")
    base, total = shards[0].base, len(shards)
    names = [base + (f"-{number:05d}-of-{total:05d}" if total > 1 else "") + _SUFFIX for number in range(1, total + 1)]
    for shard, name in zip(shards, names, strict=True):
        os.replace(shard.path, os.path.join(folder, name))
    for path in list(Path(part).iterdir()):
        if not path.name.endswith((_SUFFIX, ".json")) or not path.name.startswith(base):
            os.replace(path, os.path.join(folder, path.name))
    variant = f".{index['variant']}" if index["variant"] else ""
    place = Path(folder, f"{base.removesuffix(variant)}{_SUFFIX}.index{variant}.json")
    if total > 1:
        metadata = {"total_parameters": index["parameters"], "total_size": sum(shard.size for shard in shards)}
        weights = {key: name for shard, name in zip(shards, names, strict=True) for key in shard.keys}
        text = json.dumps({"metadata": metadata, "weight_map": weights}, indent=2, sort_keys=True)
        (unfinished := Path(part, "index")).write_text(f"{text}\n", encoding="utf-8")
        os.replace(unfinished, place)
    else:
        place.unlink(missing_ok=True)
    for path in Path(folder).glob(f"*{_SUFFIX}"):
        stem = path.name.removesuffix(_SUFFIX)
        numbered = _NUMBERED.fullmatch(stem)
        if path.name not in names and base == (numbered[1] if numbered else stem):
            path.unlink()


def _streamed(shards: list[Shard], part: str, transport: Transport) -> list[Shard]:
    """Bring files from the disks of other processes to that of process 0; returns those that lie here then."""
    writer = transport.topology.locate(0)[1]
    if transport.process != 0:
        if transport.replica == 0:
            transport.send_object(shards, writer, _TAG).wait()
            for piece in (piece for shard in shards for piece in _pieces(shard.path)):
                send_piece(piece, transport, writer, _TAG)
        return []
    arrived = []
    for rank in range(transport.topology.ranks):
        for number, shard in enumerate([] if rank == writer else transport.receive_object(rank, _TAG)):
            path = os.path.join(part, f"{rank}-{number}{_SUFFIX}")
            with open(path, "wb") as file:
                while piece := receive_piece(transport, rank, _TAG):
                    file.write(piece)
            arrived.append(shard._replace(path=path))
        arrived += shards if rank == writer else []
    return arrived


def _pieces(path: str) -> Iterator[bytes]:
    """The bytes of a file, with an empty piece at the end."""
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
    yield b""


def install(module: nn.Module, pipeline: Pipeline, meet: Callable[[str], None]) -> None:
    """Let the Hugging Face models in a module be exported while it is divided.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        meet: waits for all processes, and raises where they cannot come.
    """
    if len(pipeline.pipeline_members) > 1:
        for name, model in _models(module):
            vars(model)[_METHOD] = SavePretrained(model, f"{name}." if name else "", pipeline, meet)


def remove(module: nn.Module) -> None:
    """Let them be exported as always: the module is whole."""
    for _, model in _models(module):
        vars(model).pop(_METHOD, None)


def _models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The models of Transformers, and those of PEFT around them."""
    modules = (("transformers.modeling_utils", "PreTrainedModel"), ("peft", "PeftModel"))
    kinds = tuple(getattr(sys.modules[name], kind) for name, kind in modules if name in sys.modules)
    return ((name, part) for name, part in module.named_modules() if isinstance(part, kinds))
