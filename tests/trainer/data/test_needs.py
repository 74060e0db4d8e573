"""Each rank of a pipeline gets the tensors that it reads, and stand-ins for the others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.intercept.withheld import Withheld
from lightning_pipe.transport.gloo import GlooTransport
from lightning_pipe.transport.objects import encode
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

RANKS, BATCHES, EPOCHS = 3, 4, 2
IMAGE, TARGET = (3, 16, 16), (768,)


class Images(Dataset[dict[str, Tensor]]):
    """Images with a target as large, both random."""

    def __len__(self) -> int:
        return 8 * BATCHES - 2  # the last batch is short

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        return {"image": draw(IMAGE), "target": draw(TARGET), "number": torch.tensor(index)}


class Reconstruction(L.LightningModule):
    """Makes the target of the image."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [768, 16, 16, 16, 768]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))

    def loss(self, batch: dict[str, Tensor], number: int) -> Tensor:
        image = (batch["image"] / 2).flatten(1)  # which stages behind the first one have no use for
        made = self.layers(image)
        loss = F.mse_loss(made, batch["target"])
        self.log("loss", loss)
        return loss

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return self.loss(batch, number)

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        self.log("validation", self.loss(batch, number))

    def predict_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return self.layers(batch["image"].flatten(1))

    def train_dataloader(self) -> Any:
        return DataLoader(Images(), batch_size=8)

    val_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class ReadsLater(Reconstruction):
    """The first stage reads the target as well from the third batch on."""

    def loss(self, batch: dict[str, Tensor], number: int) -> Tensor:
        if number < 2:
            return super().loss(batch, number)
        return super().loss({**batch, "image": batch["image"] + batch["target"].mean(1)[:, None, None, None]}, number)


class KeepsForLayer(Reconstruction):
    """A layer finds the target where the step has put it, once it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda _, args, out: out + self.now["target"].mean(1, keepdim=True))

    def loss(self, batch: dict[str, Tensor], number: int) -> Tensor:
        self.now = batch
        return super().loss(batch, number)


class Looking(L.Callback):
    """Looks at what it is given of training batches."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.seen.append(float(batch["target"].sum() + batch["image"].sum()))


class Received(L.Callback):
    """Counts the stand-ins among what the Trainer is given. Asks for nothing: it is taken for one of Lightning's."""

    def __init__(self) -> None:
        self.stand_ins: Counter[str] = Counter()
        for stage in ("train", "validation", "predict"):
            setattr(self, f"on_{stage}_batch_start", self._counting(stage))

    def _counting(self, stage: str) -> Any:
        def hook(trainer: Any, module: Any, batch: Any, *_: Any) -> None:
            self.stand_ins.update(f"{stage} {name}" for name, leaf in batch.items() if isinstance(leaf, Withheld))

        hook.__module__ = "lightning.pytorch.tests"
        return hook


def fitted(
    model: type[Reconstruction], devices: int | None, callbacks: Any = (), predict: bool = False, **options: Any
) -> Any:
    """Losses, predictions, and the stand-ins that this rank was given."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(3, verbose=False)
    received = Received()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(micro_batches=2, layers="layers", **options) if devices else "auto",
        max_epochs=EPOCHS,
        callbacks=[received, *callbacks],
        num_sanity_val_steps=1,
        **QUIET,
    )
    module = model().double()
    trainer.fit(module)
    found = [float(trainer.callback_metrics[name]) for name in ("loss", "validation")]
    if predict:
        found += [float(each.sum()) for each in trainer.predict(module)]
    return found, dict(received.stand_ins)


def in_a_pipeline(process: int) -> dict[str, Any]:
    sent: Counter[str] = Counter()
    name, send = "", GlooTransport.send_object_to

    def counting(self: Any, obj: Any, peers: Any, tag: int) -> Any:
        # in a stream of an evaluation several batches may come in one message
        several = obj[0] if isinstance(obj, tuple) and isinstance(obj[0], list) else [obj]
        for batch in (each for each in several if isinstance(each, tuple) and each[0] == "batch"):
            sent[name] += len(peers) * sum(message.nbytes for message in encode(batch))
        return send(self, obj, peers, tag)

    GlooTransport.send_object_to = counting  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    looking = Looking()
    for name, run in {
        "read": lambda: fitted(Reconstruction, RANKS, predict=True),
        "whole": lambda: fitted(Reconstruction, RANKS, predict=True, whole_batches=True),
        "looked at": lambda: fitted(Reconstruction, RANKS, [looking]),
        "kept": lambda: fitted(KeepsForLayer, RANKS),
        "later, whole": lambda: fitted(ReadsLater, RANKS, whole_batches=True),
        "later": lambda: fitted(ReadsLater, RANKS),
    }.items():
        try:
            found[name] = run()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {**found, "sent": sent, "seen": looking.seen}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each process has found; process 0 has the last stage, and loads."""
    return run_trainers(in_a_pipeline, RANKS, timeout=100)


def test_each_rank_gets_what_it_reads(ranks: list[dict[str, Any]]) -> None:
    """All but the first batch of every epoch; a prediction is at its end before the first batch is."""
    last, middle, first = (each["read"][1] for each in ranks)
    times = EPOCHS * (BATCHES - 1)
    assert last == {}
    assert first == {"train target": times, "validation target": times}
    assert middle == {f"{stage} {name}": times for stage in ("train", "validation") for name in ("image", "target")}
    assert ranks[1]["whole"][1] == ranks[2]["whole"][1] == {}


def on_two_ranks(process: int) -> Any:
    return fitted(Reconstruction, 2, schedule="interleaved")


@pytest.mark.slow
def test_ranks_with_several_stages_get_what_any_of_them_reads() -> None:
    plain, _ = fitted(Reconstruction, None)
    last, first = run_trainers(on_two_ranks, 2, timeout=60)
    assert last[0] == first[0] == pytest.approx(plain, rel=1e-9)
    times = EPOCHS * (BATCHES - 1)
    assert first[1] == {"train target": times, "validation target": times}
    assert last[1] == {}


def test_fewer_bytes_are_sent(ranks: list[dict[str, Any]]) -> None:
    sent = ranks[0]["sent"]
    samples = len(Images()) - 8
    # the middle stage gets neither tensor, the first one gets images; in training and validation
    spared = EPOCHS * 2 * 3 * samples * 768 * 8
    assert sent["whole"] - sent["read"] == pytest.approx(spared, rel=0.05)


def test_numbers_are_those_of_one_device(ranks: list[dict[str, Any]]) -> None:
    plain, _ = fitted(Reconstruction, None, predict=True)
    for each in ranks:
        for name in ("read", "whole"):
            assert each[name][0] == pytest.approx(plain, rel=1e-9)
        assert each["looked at"][0] == pytest.approx(plain[:2], rel=1e-9)


def test_hooks_of_the_users_see_whole_batches(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["seen"]) == EPOCHS * BATCHES
    assert ranks[0]["seen"] == ranks[1]["seen"] == ranks[2]["seen"]
    assert ranks[1]["looked at"][1].keys() == {"validation image", "validation target"}


def test_what_the_step_keeps_is_read(ranks: list[dict[str, Any]]) -> None:
    """A layer may find it there."""
    plain, _ = fitted(KeepsForLayer, None)
    for each in ranks:
        assert each["kept"][0] == pytest.approx(plain, rel=1e-9)
        assert each["kept"][1] == {}


def test_what_is_read_later_is_an_error_with_a_remedy(ranks: list[dict[str, Any]]) -> None:
    plain, _ = fitted(ReadsLater, None)
    assert "CutError" in ranks[2]["later"]
    assert "needs batch['target'], which was not sent to this rank" in ranks[2]["later"]
    assert "PipeStrategy(whole_batches=True)" in ranks[2]["later"]
    assert all(isinstance(each["later"], str) for each in ranks)
    assert all(each["later, whole"][0] == pytest.approx(plain, rel=1e-9) for each in ranks)
