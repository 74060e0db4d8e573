"""A small Llama in three dimensions, and the bytes that each of its processes has when it has most."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipe import PipeStrategy, plan
from lightning_pipe.config import Sharding
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.local_parts import local
from lightning_pipe.planning.render import Plan
from lightning_pipe.sharding.fully_sharded import FullySharded
from lightning_pipe.simulate import Held
from tests.support.trainer_runs import QUIET, quiet

RANKS, BATCH = 2, 4
POINTS: tuple[tuple[int, int, Sharding], ...] = (
    *((2, 1, False), (2, 1, "parameters"), (1, 2, False)),
    *((2, 2, False), (2, 2, "parameters")),
)
"""Replicas, tensor ranks, and what the replicas divide: 2 x 2 x 1, 2 x 1 x 2 and 2 x 2 x 2 processes."""


class Llama(L.LightningModule):
    """Transformers' own plan says how tensor ranks divide it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=16))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Most(L.Callback):
    """What a process has behind the backward passes of its second batch, before any of it is summed and let go."""

    def __init__(self) -> None:
        self.found = Held(0, 0, 0, 0)
        self._trainer: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._trainer = trainer if trainer.global_step else None

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.look(())

    def look(self, divided: Iterable[Any]) -> None:
        """Count, with parameters that are whole for the time of a batch, and their parts."""
        if self._trainer is None:
            return
        own = [p for p in (*self._trainer.lightning_module.parameters(), *divided) if not isinstance(p, AbsentTensor)]
        states = [value for state in self._trainer.optimizers[0].state.values() for value in state.values()]
        moments = [value for value in states if isinstance(value, Tensor) and value.dim()]
        now = Held(*map(_bytes, (own, (p.grad for p in own), moments)), 0)
        self.found = max(self.found, now, key=sum)


def _bytes(tensors: Iterable[Any]) -> int:
    """Of these tensors on this process, each memory once."""
    present = (local(each) for each in tensors if each is not None and not isinstance(each, AbsentTensor))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in present}.values())


def train(process: int, replicas: int, tensor: int, sharding: Sharding) -> tuple[Held, str]:
    """Two batches; what this process has at the most, and what it prints."""
    quiet()
    warnings.filterwarnings("ignore")
    torch.manual_seed(1)
    most, reduce = Most(), FullySharded._reduce

    def reduced(own: FullySharded, key: int) -> None:
        divided = own._parameters(*own._order)
        most.look([each for both in divided for each in both])
        reduce(own, key)

    strategy = PipeStrategy(
        "1f1b",
        micro_batches=2,
        data_parallel_size=replicas,
        tensor_parallel_size=tensor,
        shard_optimizer=sharding,
        layers="model.model.layers",
        balance="parameters",
        gather_limit=0,
        compare_losses=False,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS * replicas * tensor,
        strategy=strategy,
        max_steps=2,
        callbacks=[most],
        use_distributed_sampler=False,
        **QUIET,
    )
    tokens = torch.randint(0, 64, (2 * BATCH, 8), generator=torch.Generator().manual_seed(2))
    with patch.object(FullySharded, "_reduce", reduced), redirect_stdout(StringIO()) as printed:
        trainer.fit(Llama(), DataLoader(tokens, batch_size=BATCH))
    return most.found, printed.getvalue()


def planned(module: Llama, replicas: int, tensor: int, sharding: Sharding) -> Plan:
    """The plan of such a run."""
    return plan(
        module,
        RANKS,
        BATCH,
        micro_batches=2,
        layers="model.model.layers",
        replicas=replicas,
        tensor_parallel_size=tensor,
        shard_optimizer=sharding,
        accelerator="cpu",
    )
