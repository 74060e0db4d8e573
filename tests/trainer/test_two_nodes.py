"""Several nodes, each with an agent of torchrun on this host: equality, restarts, and nodes that die."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe.config import RankOrder
from lightning_pipe.errors import CommunicationError
from tests.support import hosts, oracle
from tests.support.lit_modules import Lit, dataset
from tests.support.nodes import node_outcomes, run_nodes
from tests.support.processes import WorldTimeoutError
from tests.support.trainer_runs import QUIET, quiet

BATCHES = 2
TWO_BY_TWO: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "micro_batches": 2}


class Ordered(Lit):
    """Without what draws numbers or counts: a run that is resumed has the weights of one that is not."""

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(8 * BATCHES), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trained(
    strategy: Any,
    devices: int,
    nodes: int,
    folder: Path | None = None,
    *callbacks: L.Callback,
    model: type[L.LightningModule] = Ordered,
    **options: Any,
) -> tuple[L.Trainer, dict[str, Tensor]]:
    """Two epochs; with a folder from its last checkpoint, if it has one."""
    quiet()
    saving = [] if folder is None else [ModelCheckpoint(folder, save_last=True)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=2,
        callbacks=[*saving, *callbacks],
        use_distributed_sampler=False,
        **{**QUIET, "limit_val_batches": 0, "enable_checkpointing": folder is not None, **options},
    )
    L.seed_everything(7, verbose=False)
    module = model().double()
    trainer.fit(module, ckpt_path="last" if folder else None, weights_only=False)
    return trainer, oracle.state_of(module)


def one_device() -> dict[str, Tensor]:
    return {name: value for name, value in trained("auto", 1, 1)[1].items() if name.endswith(("weight", "bias"))}


def lists(weights: dict[str, Tensor]) -> dict[str, Any]:
    """As torchrun's agent can pass them on."""
    return {name: value.tolist() for name, value in weights.items()}


def assert_same(found: dict[str, Any], truth: dict[str, Tensor]) -> None:
    for name, value in truth.items():
        own = torch.tensor(found[name], dtype=torch.float64)
        assert torch.allclose(own, value.double(), rtol=1e-9, atol=1e-9), name


# ------------------------------------------------------------------ equality


def fit_on_nodes(
    rank_order: RankOrder, model: type[L.LightningModule] = Ordered
) -> tuple[int, int, int, dict[str, Any]]:
    """A worker: which replica and rank it is, with how many others it shares memory, and the weights."""
    from lightning_pipe import PipeStrategy

    strategy = PipeStrategy(**TWO_BY_TWO, compare_losses=False, rank_order=rank_order)
    trainer, weights = trained(strategy, devices=2, nodes=2, model=model)
    transport = trainer.strategy.world.transport  # type: ignore[attr-defined]
    return transport.replica, transport.rank, len(transport._local), lists(weights)


@pytest.mark.feature("Trainer arguments", "num_nodes", "works", "with torchrun")
@pytest.mark.parametrize("rank_order", ["replicas", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_both_orders_of_ranks_train_as_one_device(rank_order: RankOrder, capfd: pytest.CaptureFixture[str]) -> None:
    found = run_nodes(fit_on_nodes, rank_order, per_node=2, timeout=50)
    truth = one_device()
    assert [sorted(node) for node in found] == [[0, 1], [2, 3]]
    for number, node in enumerate(found):
        # a node has one pipeline, or both replicas of one rank
        assert {place[rank_order == "replicas"] for place in node.values()} == {
            number if rank_order == "pipeline" else 1 - number
        }
        for *_, weights in node.values():
            assert_same(weights, truth)
    printed = " ".join(capfd.readouterr().out.split())
    assert "Nodes node 0 has ranks 0, 1; node 1 has ranks 2, 3" in printed


# ------------------------------------------------------------------ two hosts


class Wide(Ordered):
    """With messages and gradients that are large beside what the processes say to each other."""

    def __init__(self) -> None:
        super().__init__(width=192)


@pytest.mark.slow
@pytest.mark.parametrize("rank_order", get_args(RankOrder))
def test_over_a_network_both_orders_train_as_one_device(rank_order: RankOrder) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    with hosts.joined() as ends:
        found = run_nodes(fit_on_nodes, rank_order, Wide, per_node=2, timeout=60, hosts=ends)
    truth = {name: value for name, value in trained("auto", 1, 1, model=Wide)[1].items() if name.endswith("weight")}
    for node in found:
        for *_, shared, weights in node.values():
            assert shared == 1  # the other process of this host
            assert_same(weights, truth)


# ------------------------------------------------------------------ restarts


class DiesOnce(L.Callback):
    """In the first attempt the process of the other node than process 0's is killed in the second epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.global_rank == 1 and trainer.global_step == BATCHES + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_again(folder: str) -> tuple[int, dict[str, Any]]:
    from lightning_pipe import PipeStrategy

    begun: list[int] = []

    class Begun(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            begun.append(trainer.global_step)

    _, weights = trained(PipeStrategy(micro_batches=2), 1, 2, Path(folder), DiesOnce(), Begun())
    return begun[0], lists(weights)


@pytest.mark.slow
@pytest.mark.feature("Checkpoints", 'ckpt_path="last" after a restart of torchrun', "works")
def test_a_run_whose_worker_dies_is_resumed_from_the_last_checkpoint(tmp_path: Path) -> None:
    found = run_nodes(fit_again, str(tmp_path), restarts=1, timeout=60)
    truth = one_device()
    for node in found:
        for begun, weights in node.values():
            assert begun == BATCHES
            assert_same(weights, truth)


# ------------------------------------------------------------------ nodes that die


class Ends(L.Callback):
    """Agent and workers of one node get a signal in the second epoch."""

    def __init__(self, node: int, number: int) -> None:
        self.node, self.number = node, number

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.node_rank == self.node and trainer.global_step == BATCHES + 1:
            os.killpg(os.getpgrp(), self.number)


def fit_until(node: int, number: int) -> None:
    from lightning_pipe import PipeStrategy

    strategy = PipeStrategy(micro_batches=2, compare_losses=False, timeout=timedelta(seconds=8))
    trained(strategy, 1, 2, None, Ends(node, number))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "number", "words"),
    [
        (1, signal.SIGKILL, r"CommunicationError: Rank 0 could not .* rank 1 .*(closed|reset|gone|left)"),
        # with node 0 goes the store of the agents: that of node 1 may notice it first, say so and end its worker
        (0, signal.SIGKILL, r"CommunicationError: Rank 1 could not .* rank 0 |RendezvousConnectionError"),
    ],
)
def test_a_node_that_dies_ends_the_others(node: int, number: int, words: str) -> None:
    ended = node_outcomes(fit_until, node, number, timeout=40)
    other = ended[1 - node]
    assert other.error is not None
    assert not isinstance(other.error, WorldTimeoutError), "it had to be ended"
    assert re.search(words, other.output), other.output[-3000:]


class Pulls(L.Callback):
    """One node loses its network in the second epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.node_rank == 1 and trainer.global_step == BATCHES + 1:
            hosts.pull()


def fit_until_pulled(folder: str) -> None:
    """Leaves the error in a file, and stays until the other rank has had the time to end."""
    from lightning_pipe import PipeStrategy

    try:
        trained(PipeStrategy(micro_batches=2, timeout=timedelta(seconds=8)), 1, 2, None, Pulls())
    except CommunicationError as error:
        (Path(folder) / os.environ["RANK"]).write_text(str(error))
    time.sleep(15)


@pytest.mark.slow
def test_a_cable_that_is_pulled_ends_the_ranks_at_both_ends(tmp_path: Path) -> None:
    """No packet says that a connection has ended: each end knows it by the time that passes."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    with hosts.joined() as ends:
        # torchrun's agent on the host without a network waits for the other one for long: it has to be ended
        second = node_outcomes(fit_until_pulled, str(tmp_path), timeout=55, hosts=ends)[1].output
    assert re.search(r"Rank 0 could not .* within 8 s(.|\n)*has not come on since", (tmp_path / "0").read_text())
    # it cannot ask the store, and prints where its threads are
    assert re.search(r"Timeout \(0:00:15\)!(.|\n)*failures.py", second), second[-2000:]
