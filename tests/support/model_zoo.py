"""The models of the equality sweeps: tiny, deterministic, in float64, each a LightningModule that knows no pipeline.

Every model is a way to be silently wrong. All of them train with plain SGD or with Adam and a large eps, because Adam
turns the rounding noise of a gradient that is truly zero (an attention key's bias) into a step of full length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
BATCH = 8
INITIAL = 0.3
"""Spread of the initial weights of the Hugging Face models: with their 0.02 a model so small hardly reacts."""


class Module(L.LightningModule):
    """What the models have in common; each one writes `loss`, as a mean over the samples."""

    learning_rate = 0.1

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_plus_one", loss.detach() + 1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


class Regression(Module):
    """Maps ``x`` to ``y``; the models below differ in `forward`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    """A plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def blocks(number: int = 4) -> list[nn.Module]:
    return [Block() for _ in range(number)]


class Mlp(Module):
    """An nn.Sequential with another one inside; a batch is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        inner = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(*inner), nn.Linear(WIDTH, 1))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)


class Residual(Regression):
    """Residuals, norms and learned scales between the layer calls."""

    def __init__(self) -> None:
        super().__init__(blocks(5))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, len(self.layers)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm, scale in zip(self.layers, self.norms, self.scales, strict=True):
            x = x + scale * layer(norm(x))
        return self.head(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class HiddenStates(Regression):
    """Every layer reads the sum of all earlier hidden states, the head their mean."""

    def __init__(self) -> None:
        super().__init__(blocks(5))

    def forward(self, x: Tensor) -> Tensor:
        states = [self.embed(x)]
        for layer in self.layers:
            states.append(layer(sum(states)))
        return self.head(torch.stack(states).mean(0))


class HuggingFace(Module):
    """An unmodified model with its own loss; ``labels`` are in the batch."""

    learning_rate = 0.05

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def _mean_of_tokens(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The causal language model's loss without its detour over float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt2() -> Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_layer=4,
        n_embd=16,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=INITIAL,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    model.loss_function = _mean_of_tokens
    return HuggingFace(model)


def bert() -> Module:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=INITIAL,
    )
    return HuggingFace(BertForPreTraining(config))


def llama() -> Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=INITIAL,
    )
    model = LlamaForCausalLM(config)
    model.loss_function = _mean_of_tokens
    return HuggingFace(model)


def t5() -> Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return HuggingFace(T5ForConditionalGeneration(config))


class Structures(Regression):
    """Dictionaries, None, whole numbers and integer tensors go from layer to layer."""

    class Layer(Block):
        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            x = super().forward(state["x"])
            chosen = torch.where(state["even"].unsqueeze(-1), x, -x) if state["mask"] is None else x
            return {"x": chosen, "even": ~state["even"], "count": state["count"] + 1, "mask": None, "depth": 3}

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {
            "x": self.embed(x),
            "even": x[:, 0] > 0,
            "count": torch.zeros(len(x), dtype=torch.long, device=x.device),
        }
        state["mask"] = None
        for layer in self.layers:
            state = layer(state)
        return self.head(state["x"]) * state["count"].unsqueeze(-1) / state["depth"]


class NonContiguous(Regression):
    """Layers return views that are not contiguous, and their gradients are expanded."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT if x.shape[-1] != WIDTH else x).mT

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(torch.stack([batch["x"], -batch["x"], batch["x"] + 1], 1))
        for layer in self.layers:
            x = layer(x)
        return x.sum((1, 2)).mean() / 10 + F.mse_loss(self.head(x[..., 0]), batch["y"])


class InPlace(Regression):
    """Layers begin by changing their input in place."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(0.5).clamp_(min=-0.1))

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])


class Skips(Regression):
    """Tensors are carried past several layers and taken back in reverse order."""

    def __init__(self) -> None:
        super().__init__(blocks(6))

    def forward(self, x: Tensor) -> Tensor:
        x, carried = self.embed(x), []
        for layer in self.layers[:3]:
            x = layer(x)
            carried.append(x)
        for layer in self.layers[3:]:
            x = layer(torch.sin(x) + carried.pop())
        return self.head(x)


class FrozenPrefix(Regression):
    """Nothing below the third layer is trained: no gradient goes there."""

    def __init__(self) -> None:
        super().__init__(blocks(5))
        for module in (self.embed, *self.layers[:2]):
            module.requires_grad_(False)


class FrozenLayers(Regression):
    """Only the head and a norm in the middle are trained."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.norm = nn.LayerNorm(WIDTH)
        for module in (self.embed, self.layers):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(self.norm(x) if i == 2 else x)
        return self.head(x)


class SharedNorm(Regression):
    """One norm runs after every layer."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return self.head(x)


class SharedByLayers(Regression):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.layers[-1].linear.weight = self.layers[0].linear.weight


class TiedToLayers(Regression):
    """Modules before and behind the layers have the weights of layers of other stages."""

    def __init__(self) -> None:
        super().__init__([*blocks(3), nn.Linear(WIDTH, 1)])
        self.embed.weight = self.layers[2].linear.weight
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x) + self.head(x).mean(1, keepdim=True)


class SharedModule(Regression):
    """One activation with a parameter occurs between all layers of a Sequential."""

    def __init__(self) -> None:
        activation = nn.PReLU()
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        super().__init__([])
        self.layers = nn.Sequential(*(layer for linear in linears for layer in (linear, activation)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class ScaleInTwoStages(Regression):
    """A learned scale is used before the first layer and after the last."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x / self.scale)


class Auxiliary(Regression):
    """Layers return a pair: the activation and a loss of their own, summed outside (a mixture of experts)."""

    class Layer(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = super().forward(x)
            return x, x.square().mean()

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, total = self.embed(batch["x"]), torch.zeros((), dtype=batch["x"].dtype, device=batch["x"].device)
        for layer in self.layers:
            x, own = layer(x)
            total = total + own
        return F.mse_loss(self.head(x), batch["y"]) + 0.1 * total


class Detached(Regression):
    """An early activation comes back without gradient, as a target and under no_grad."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = first = self.embed(batch["x"])
        for layer in self.layers:
            x = layer(x)
            with torch.no_grad():
                first = 0.5 * first + x
        return F.mse_loss(self.head(x), batch["y"]) + F.mse_loss(x, first.detach())

    def __init__(self) -> None:
        super().__init__(blocks(4))


class Keywords(Regression):
    """Layers take keywords: a mask made from the batch, a tensor computed outside, a flag."""

    class Layer(Block):
        def forward(self, x: Tensor, *, mask: Tensor, context: Tensor | None = None, negate: bool = False) -> Tensor:
            x = super().forward(x).masked_fill(mask, 0.0) + (0 if context is None else context)
            return -x if negate else x

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])
        self.context = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 1
        context = self.context(x) if bool(mask.any().item()) else None
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask=mask, context=context, negate=i % 2 == 1)
        return self.head(x)


class Branches(Regression):
    """The step takes another path through the code for every second batch."""

    def __init__(self) -> None:
        super().__init__(blocks(4))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["x"])
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1 and batch_idx % 2:
                x = x + torch.sin(3 * x)
        return F.mse_loss(self.head(x), batch["y"])


class Selects(Regression):
    """Rows are selected by masks: shapes depend on the batch's values, and on those of a layer."""

    def __init__(self) -> None:
        super().__init__(blocks(5))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        chosen = batch["x"][:, 0] > -0.5
        x = self.embed(batch["x"])[chosen]
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = x[x[:, 0] > -0.2]
            if i == 3:
                x = x.masked_select(x[:, :1] > -0.8).view(-1, WIDTH)
        return self.head(x).square().sum() / len(batch["x"])


class Appends(Regression):
    """Keeps the outputs of its steps and reads them at the end of the epoch; the step returns a dictionary."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.outs: list[Tensor] = []
        self.seen = 0

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.outs.append(loss.detach() * len(batch["x"]))
        self.seen += len(batch["x"])
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_outs", torch.stack(self.outs).sum() / self.seen)
        self.outs.clear()
        self.seen = 0


class LogsOnTheWay(Regression):
    """Values are logged before, between and after the layers, and nothing else uses them."""

    def __init__(self) -> None:
        super().__init__(blocks(4))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        self.log("input", batch["x"].mean())
        x = self.embed(batch["x"])
        for i, layer in enumerate(self.layers):
            x = layer(x)
            self.log(f"layer_{i}", x.abs().mean(), on_epoch=True)
        loss = F.mse_loss(self.head(x), batch["y"])
        self.log_dict({"output": x.mean(), "train_loss": loss}, on_step=True, on_epoch=True)
        return loss


class UnusedOutputs(Regression):
    """Layers return tensors with a gradient path that nobody uses, or only a later layer does."""

    class Layer(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            x = super().forward(x if scale is None else x * scale)
            return x, x.exp(), 2 * x.detach()

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embed(x), None
        for i, layer in enumerate(self.layers):
            x, new, _ = layer(x, scale if i == 3 else None)
            scale = new if i == 0 else scale
        return self.head(x)


class Lookups(Module):
    """Integer tensors go from layer to layer; an embedding between the layers looks them up."""

    class Layer(Block):
        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), (3 * ids + 1) % 20

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = self.embed(ids)
        for layer in self.layers:
            x, ids = layer(x, ids)
            x = x + self.embed(ids)
        return F.cross_entropy((x @ self.embed.weight.mT).mT, ids)


class WeightNorm(Regression):
    """Weights that are computed from parameters before each use, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        for layer in self.layers:
            nn.utils.parametrizations.weight_norm(layer.linear)
        nn.utils.parametrizations.weight_norm(self.embed)
        nn.utils.weight_norm(self.head)


class Recurrent(Module):
    """LSTMs as layers: their results are nested tuples, and they refer to their weights weakly."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return self.lstm(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 20)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, total = self.embed(batch["ids"]), 0.0
        for layer in self.layers:
            x, (hidden, cell) = layer(x)
            total = total + hidden.square().mean() + cell.square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["ids"].flatten()) + total


class Statistics(Regression):
    """Batch norm in the layers: its running statistics see every micro-batch once, in order."""

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])


class Noise(Regression):
    """Random noise is drawn in the step, before, between and after the layers."""

    def __init__(self) -> None:
        super().__init__(blocks(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x + 0.1 * torch.randn_like(x))
        for layer in self.layers:
            x = layer(x * (1 + 0.1 * torch.rand(len(x), 1, dtype=x.dtype)))
        return self.head(x) + 0.1 * torch.randn(len(x), 1, dtype=x.dtype)


class Sequences(Module):
    """Embeds integers, mixes over a dimension whose length differs from batch to batch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            attention = torch.softmax(x @ self.linear(x).mT, -1)
            return self.norm(x + attention @ x)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x.mean(1) @ self.embed.weight.mT, batch["ids"][:, 0])


def regression_batches(number: int, sizes: Sequence[int] = (BATCH,)) -> list[dict[str, Tensor]]:
    batches = []
    for index in range(number):
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(sizes[index % len(sizes)], WIDTH, dtype=torch.float64, generator=generator)
        batches.append({"x": x, "y": torch.sin(3 * x).sum(1, keepdim=True)})
    return batches


def pair_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    return [(batch["x"], batch["y"]) for batch in regression_batches(number)]


def odd_batches(number: int) -> list[dict[str, Tensor]]:
    """Every third batch is short, as the last one of an epoch is."""
    return regression_batches(number, sizes=(BATCH, BATCH, 5))


def token_batches(number: int, lengths: Sequence[int] = (10,), vocabulary: int = 40) -> list[dict[str, Tensor]]:
    batches = []
    for index in range(number):
        generator = torch.Generator().manual_seed(2000 + index)
        shape = (BATCH, lengths[index % len(lengths)])
        batches.append({"ids": torch.randint(2, vocabulary, shape, generator=generator)})
    return batches


def causal_batches(number: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": batch["ids"], "labels": batch["ids"]} for batch in token_batches(number)]


def bert_batches(number: int) -> list[dict[str, Tensor]]:
    batches = []
    for index, batch in enumerate(token_batches(number)):
        ids = batch["ids"]
        mask = torch.ones_like(ids)
        mask[::2, -(1 + index % 3) :] = 0
        following = torch.arange(len(ids)) % 2
        batches.append(
            {"input_ids": ids, "attention_mask": mask, "labels": ids.flip(1), "next_sentence_label": following}
        )
    return batches


def t5_batches(number: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": batch["ids"], "labels": batch["ids"][:, :7].contiguous()} for batch in token_batches(number)]


def token_batches_of_20(number: int) -> list[dict[str, Tensor]]:
    return token_batches(number, vocabulary=20)


def sequence_batches(number: int) -> list[dict[str, Tensor]]:
    return token_batches(number, lengths=(6, 9, 4), vocabulary=20)


@dataclass(frozen=True, eq=False)
class Entry:
    """One model of the sweeps.

    Args:
        name: what the test is called.
        construct: makes the module; called under a fixed seed.
        batches: makes the first batches, always the same ones.
        layers: what the user passes as ``layers=``.
        threads: several ranks may live in one process. Not so where random numbers are drawn: threads share generators.
        replicas: runs in which a stage is on several ranks equal one device.
        fewest: samples that a micro-batch must have.
        main: belongs to the full sweep; the others are swept at fewer points.
        tolerance: by how much losses and weights may differ.
    """

    name: str
    construct: Callable[[], Module]
    batches: Callable[[int], list[Any]] = field(default=regression_batches)
    layers: str | list[str] | None = None
    threads: bool = True
    replicas: bool = True
    fewest: int = 1
    main: bool = False
    tolerance: float = 1e-9

    def build(self) -> Module:
        """The module, with the same weights each time."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.construct().double().train()

    def __str__(self) -> str:
        return self.name


ZOO: dict[str, Entry] = {
    entry.name: entry
    for entry in [
        Entry("mlp", Mlp, pair_batches, main=True),
        Entry("residual", Residual, layers="layers", main=True),
        Entry("hidden_states", HiddenStates, main=True),
        Entry("gpt2", gpt2, causal_batches, main=True),
        Entry("bert", bert, bert_batches, main=True),
        Entry("llama", llama, causal_batches, main=True),
        Entry(
            "t5",
            t5,
            t5_batches,
            layers=["model.encoder.block", "model.decoder.block"],
            main=True,
            # its softmax is one of float32 (Transformers 5.9), whose rounding another order of float64 sums flips
            tolerance=1e-7,
        ),
        Entry("structures", Structures),
        Entry("non_contiguous", NonContiguous),
        Entry("in_place", InPlace),
        Entry("skips", Skips),
        Entry("frozen_prefix", FrozenPrefix),
        Entry("frozen_layers", FrozenLayers),
        Entry("shared_norm", SharedNorm),
        Entry("shared_by_layers", SharedByLayers),
        Entry("tied_to_layers", TiedToLayers, layers="layers"),
        Entry("shared_module", SharedModule),
        Entry("scale_in_two_stages", ScaleInTwoStages),
        Entry("auxiliary", Auxiliary),
        Entry("detached", Detached),
        Entry("keywords", Keywords),
        Entry("branches", Branches),
        Entry("selects", Selects),
        Entry("appends", Appends),
        Entry("logs_on_the_way", LogsOnTheWay),
        Entry("unused_outputs", UnusedOutputs),
        Entry("lookups", Lookups, token_batches_of_20, layers="layers"),
        Entry("weight_norm", WeightNorm, layers="layers"),
        Entry("recurrent", Recurrent, token_batches_of_20, layers="layers"),
        Entry("statistics", Statistics, replicas=False, fewest=2),
        Entry("noise", Noise, threads=False),
        Entry("sequence_lengths", Sequences, sequence_batches, layers="layers"),
        Entry("odd_batches", Residual, odd_batches, layers="layers"),
    ]
}
MAIN = [entry for entry in ZOO.values() if entry.main]
SMALL = [entry for entry in ZOO.values() if not entry.main]
