"""Everyday code around layers gives the numbers of one device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.engine.pipeline import Pipeline
from tests.support.engine_runs import assert_evaluates, assert_same, pipelined, unchanging
from tests.support.pairs import pairs, slow_but
from tests.support.small_net import WIDTH, Net, batches

pytestmark = pytest.mark.usefixtures("float64")


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scales: list[dict[str, Tensor]]) -> Tensor:
        return x + torch.tanh(self.linear(x) * scales[0]["scale"])


class ParameterOfAModule(Net):
    """A module outside the layers is given a parameter that nothing else uses, as DeBERTa's norm of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        table = self.norm(self.table)
        for layer in self.layers:
            h = layer(h) + table.mean(0)
        return h


class ParameterOfLayers(Net):
    """Layers are given a parameter, inside of containers."""

    block = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, [{"scale": self.scale}])
        return h


class NumbersOfSomeBatches(Net):
    """Computes a number of every layer's result, and uses it in some batches, as those that are logged at times."""

    def forward(self, x: Tensor, y: Tensor, wanted: Tensor) -> Any:  # type: ignore[override]
        h, kept = self.embed(x), []
        for layer in self.layers:
            h = layer(h)
            mean = h.mean()
            if wanted[0]:
                kept.append(mean)
        return F.mse_loss(self.head(h), y) + sum(kept)


class FilledPartByPart(Net):
    """What is in new memory differs between stages, until the step has written there."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            wide = torch.empty(len(x), 2 * WIDTH)
            wide[:, :WIDTH] = layer(h)
            wide[:, WIDTH:] = h
            h = wide[:, 1 : WIDTH + 1]
        leaf = torch.empty(WIDTH, requires_grad=True)
        with torch.no_grad():
            leaf.fill_(0.5)
        return h * leaf


@pytest.mark.parametrize(
    "kind",
    slow_but([ParameterOfAModule, ParameterOfLayers, FilledPartByPart], ParameterOfAModule, FilledPartByPart),
    ids=lambda kind: kind.__name__,
)
def test_what_surrounds_layers(kind: type[Net], run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_same(kind(), batches(), **run)


def test_numbers_that_some_batches_use(run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    data = [{**batch, "wanted": torch.full((7,), number in (1, 3))} for number, batch in enumerate(batches(5))]
    assert_same(NumbersOfSomeBatches(), data, **run)


class Compares(Net):
    """Compares what is no layer's result with one: Python may ask the one on the right first."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h = (
                h * (x < h)
                + 0.5 * (x >= h) * h
                + 0.1 * torch.gt(x, h) * x
                + (h > x)
                - (h >= 0.2) * h
                + (x - h) * (h < 9)
            )
        return h


def test_comparisons(run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_same(Compares(), batches(), **run)


class Reads(Net):
    """Reads numbers, text and arrays between layers, and decides by them."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            assert not torch.isnan(h).any()
            if h.mean() > 0:
                h = h * 2
            h = h * (1 + 0.1 * h.detach().sum().item())
            h = (
                h
                + sum(h[0].tolist())
                + float(f"{h.detach().norm():.3f}")
                + int(h.argmax())
                + len(str(bool(h.min() > 0)))
            )
            h = h + float(np.tanh(h.detach().numpy()).sum()) + 0.0 * math.isnan((h.detach() * math.nan).sum().item())
            h = torch.sin(h)
        return h


class Collector:
    """Keeps what hooks on parts of layers see, as Hugging Face's models collect router logits."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.seen: list[Tensor] = []
        self.norms: list[float] = []
        for layer in layers:
            layer.linear.register_forward_hook(self.keep)
            layer.linear.register_forward_hook(lambda module, args, out: out * 1.1)
            layer.linear.register_forward_hook(self.note, with_kwargs=True)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.seen += [out, args[0].detach().square()]

    def note(self, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        self.norms.append(out.detach().norm().item())


class Collects(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        if not hasattr(self, "collector"):
            self.collector = Collector(self.layers)
        self.collector.seen.clear()
        self.collector.norms.clear()
        h = super().body(h, x)
        assert len(self.collector.norms) == len(self.layers)
        return h * torch.stack(self.collector.seen).mean(0).exp() + sum(self.collector.norms)


class LastCollected(Net):
    """What a hook keeps is what its layer returns."""

    class block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handles = [layer[1].register_forward_hook(lambda module, args, out: seen.append(out)) for layer in self.layers]
        try:
            h = super().body(h, x)
        finally:
            for handle in handles:
                handle.remove()
        return h + sum(seen)


@pytest.mark.parametrize("recompute", slow_but(["never", "always"], "always"))
def test_values_read_between_layers(run: dict[str, Any], recompute: str) -> None:
    torch.manual_seed(1)
    assert_same(Reads(), batches(), **run, recompute=recompute)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    pairs([Collects, LastCollected], ["never", "always"], lambda kind, recompute: kind != recompute),
)
def test_forward_hooks_on_parts_of_layers(kind: type[Net], run: dict[str, Any], recompute: str) -> None:
    torch.manual_seed(1)
    assert_same(kind(), batches(), **run, recompute=recompute)


def tokens(count: int = 2) -> list[dict[str, Tensor]]:
    ids = [torch.randint(3, 30, (4, 6)) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


# with recompute: Hugging Face's models register their hooks in the first run of the step
@pytest.mark.parametrize(
    ("kind", "recompute"),
    slow_but([("Mixtral", "never"), ("Qwen2Moe", "never"), ("Olmoe", "always")], ("Mixtral", "never")),
)
def test_losses_of_routers(kind: str, run: dict[str, Any], recompute: str) -> None:
    torch.manual_seed(1)
    options = SIZES | {"num_key_value_heads": 2, "num_experts_per_tok": 2, "output_router_logits": True}
    options |= {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4}
    options |= {"router_aux_loss_coef": 0.5, "experts_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2}
    if kind == "Qwen2Moe":
        options |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert_same(model, tokens(), 2, **{**run, "layers": "model.layers"}, recompute=recompute)


@pytest.mark.slow  # fast: ParameterOfAModule
@pytest.mark.parametrize("kind", ["Deberta", "DebertaV2"])
def test_relative_positions(kind: str, run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    options = SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    options |= {"norm_rel_ebd": "layer_norm", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    assert_same(model, tokens(), 2, **{**run, "layers": f"{model.base_model_prefix}.encoder.layer"})


class Encodes(Net):
    """In evaluation torch's encoder leaves zeros at padded places, if the padding is on the right."""

    def __init__(self, left: bool = False, norm: bool = False) -> None:
        super().__init__()
        del self.layers
        self.left = left
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH) if norm else None)
        for number, parameter in enumerate(self.encoder.parameters()):
            torch.manual_seed(number)
            nn.init.normal_(parameter, 0.5, 0.3)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = h.unsqueeze(1).repeat(1, 4, 1) + torch.arange(4)[:, None]
        padding = torch.arange(4) >= torch.arange(len(x))[:, None] % 4 + 1
        padding = padding.flip(1) if self.left else padding
        return self.encoder(h, src_key_padding_mask=padding).mean(1)


@pytest.mark.parametrize("options", slow_but([{}, {"left": True}, {"norm": True}], {"left": True}), ids=str)
def test_encoders_treat_padding_as_on_one_device(options: dict[str, bool], run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    (data,) = batches(1)
    assert_evaluates(Encodes(**options), data, data, training=False, **{**run, "layers": "encoder.layers"})


class LeavesOut(Net):
    """Leaves layers out, but never the last one."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 3 or x[:, number].sum() > 0:
                h = layer(h)
        return h


class KeepsForLater(Net):
    """An attribute that the step sets is all that uses a layer's result a second time."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = self.layers[0](h)
        kept = h
        for layer in list(self.layers)[1:]:
            h = layer(h)
        self.kept = kept
        return h


def test_layers_that_are_left_out(run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_same(LeavesOut(), batches(5), **run)


def test_what_outlives_the_step_is_used(run: dict[str, Any]) -> None:
    torch.manual_seed(1)
    means: list[float] = []

    def note(pipeline: Pipeline, module: nn.Module) -> None:
        if pipeline.is_loss_rank:
            means.append(float(module.kept.detach().mean()))

    net = KeepsForLater()
    data = batches(3)
    pipelined(net, data, 1, between=note, optimizer=unchanging, **run)
    expected = [float(net.layers[0](net.embed(batch["x"])).mean()) for batch in data]
    assert means == pytest.approx(expected, abs=1e-12)
