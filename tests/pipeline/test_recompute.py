"""Recomputation: the same gradients to the last bit, less memory, and side effects once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe import schedules
from lightning_pipe.errors import CutError
from lightning_pipe.partition import find_layers
from lightning_pipe.pipeline.memory_transport import memory_world
from lightning_pipe.pipeline.recompute import is_recomputing
from lightning_pipe.pipeline.runner import Pipeline
from lightning_pipe.pipeline.topology import Topology
from tests.pipeline.engine import assert_same

Recompute = Literal["never", "except_last", "always"]


def gradients_of(
    net: nn.Module,
    parts: list[Any],
    recompute: Recompute,
    *,
    stages: int = 2,
    layers: str = "layers",
    schedule: str = "gpipe",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers after one batch on one rank."""
    (transport,) = memory_world(Topology(ranks=1))
    net = copy.deepcopy(net)
    sequence = find_layers(net, layers)
    balance = [len(sequence) // stages + (stage < len(sequence) % stages) for stage in range(stages)]
    pipeline = Pipeline(net, sequence, balance, schedules.get(schedule), transport, recompute=recompute)
    pipeline.train(lambda _, part: net(part), parts, [1 / len(parts)] * len(parts), seed=3)
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return grads, {name: b.clone() for name, b in net.named_buffers()}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())
        self.calls = 0

    def forward(self, x: Tensor, scale: int, extra: tuple[Tensor, ...]) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        if not is_recomputing():
            self.calls += 1
        return self.body(x) * scale, scale + 1, (*extra, x)


class Net(nn.Module):
    """Several tensors, tuples and integers between the layers; dropout and batch norm inside and outside."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scale: int = 1
        extra: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x, scale, extra = layer(self.drop(x), scale, extra)
        return self.norm(x + sum(extra)).square().mean() * scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_gradients_are_the_same_to_the_last_bit(recompute: Recompute, schedule: str) -> None:
    torch.manual_seed(0)
    net, parts = Net(), list(torch.randn(12, 8).tensor_split(3))
    expected, buffers = gradients_of(net, parts, "never", schedule=schedule)
    found, found_buffers = gradients_of(net, parts, recompute, schedule=schedule)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, value in buffers.items():
        assert torch.equal(found_buffers[name], value), name


def test_under_autocast_the_same_bits() -> None:
    torch.manual_seed(0)
    net, parts = Net(), list(torch.randn(12, 8).tensor_split(3))

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)  # type: ignore[no-any-return]

    expected, _ = gradients_of(Cast(), parts, "never", layers="net.layers")
    found, _ = gradients_of(Cast(), parts, "always", layers="net.layers")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes that graphs hold at present, and the most at any time, counted by saved-tensor hooks."""
    count = [0, 0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            count[0] += tensor.nbytes
            count[1] = max(count)

        def __del__(self) -> None:
            count[0] -= self.tensor.nbytes

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else Kept(tensor)

    def unpack(kept: Any) -> Tensor:
        return kept.tensor if isinstance(kept, Kept) else kept  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield count


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_memory_falls_to_one_micro_batch_and_the_boundaries() -> None:
    torch.manual_seed(0)
    net, parts = Deep(), list(torch.randn(80, 16).tensor_split(8))
    peaks: dict[str, int] = {}
    for recompute in ("never", "except_last", "always"):
        with saved_bytes() as count:
            gradients_of(net, parts, recompute, stages=1)
        peaks[recompute] = count[1]
    one = peaks["never"] / 8
    assert peaks["always"] <= one * 1.01  # the boundary of a single stage is the batch itself, which no graph holds
    assert peaks["except_last"] <= 2 * one * 1.01


def test_a_layer_that_changes_its_input_finds_it_as_it_came() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return self.linear(torch.sin(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Changing() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    net, parts = Outer(), list(torch.randn(6, 8).tensor_split(3))
    expected, _ = gradients_of(net, [part.clone() for part in parts], "never")
    found, _ = gradients_of(net, [part.clone() for part in parts], "always")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_user_checkpoints_inside_layers_recompute_as_well() -> None:
    class Inner(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.body, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Inner(reentrant) for reentrant in (False, True, False, True))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    net, parts = Outer(), list(torch.randn(6, 8).tensor_split(3))
    expected, _ = gradients_of(net, parts, "never")
    found, _ = gradients_of(net, parts, "always")
    # The first layer of a stage gets its input without gradient on one device and in a pipeline alike.
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_step_that_takes_another_path_the_second_time_raises() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            x = self.layers[0](x)
            if self.runs % 2:
                x = x * 2
            return self.layers[1](x).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(CutError, match=r"another path|same path"):
        gradients_of(Fickle(), [torch.randn(2, 4)] * 2, "always", stages=2, schedule="gpipe")


TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
# fmt: off
HF: dict[str, tuple[Any, Any]] = {
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=50, n_layer=4, n_embd=16, n_head=2, n_positions=16, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        )),
        "transformer.h",
    ),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)), "model.layers"),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0,
            decoder_start_token_id=0,
        )),
        ["encoder.block", "decoder.block"],
    ),
    "bart": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(
            vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, dropout=0,
            attention_dropout=0, activation_dropout=0,
        )),
        ["model.encoder.layers", "model.decoder.layers"],
    ),
}
# fmt: on


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", HF)
def test_hugging_face_models_with_default_configurations(name: str, recompute: Recompute) -> None:
    """Caches are on by default; the step makes a new one each time it runs."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        make, layers = HF[name]
        ids = torch.randint(2, 50, (5, 9))
        batches = [{"input_ids": ids, "labels": ids}] * 2
        assert_same(make(), batches, micro_batches=2, ranks=4, layers=layers, recompute=recompute, schedule="gpipe")
    finally:
        torch.set_default_dtype(torch.float32)
