"""``generate()`` in evaluation steps: the tokens of one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import transformers as T
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET

COMMON = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"gpt2": "net.transformer.h", "llama": "net.model.layers", "t5": ["net.encoder.block", "net.decoder.block"]}
VARIANTS = [(sample, cache) for sample in (False, True) for cache in (True, False)]


def network(kind: str) -> Any:
    if kind == "gpt2":
        return T.GPT2LMHeadModel(T.GPT2Config(n_positions=32, n_embd=16, n_layer=4, n_head=2, **COMMON))
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        return T.LlamaForCausalLM(T.LlamaConfig(num_key_value_heads=1, max_position_embeddings=32, **sizes, **COMMON))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    return T.T5ForConditionalGeneration(T.T5Config(decoder_start_token_id=0, **sizes, **COMMON))


class Generates(L.LightningModule):
    """Trains with one pass, and generates in evaluation steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.lengths = network(kind), list[int]()
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def generated(self, batch: Tensor) -> list[Tensor]:
        found = []
        for sample, cache in VARIANTS:
            torch.manual_seed(5)
            options = {"do_sample": True, "temperature": 1.5, "top_k": 20} if sample else {"do_sample": False}
            mask = torch.ones_like(batch)
            options |= {"attention_mask": mask, "use_cache": cache, "max_new_tokens": 4}
            found.append(self.net.generate(input_ids=batch, **options))
        # the rank that chooses the beams reorders the caches of all layers
        found.append(self.net.generate(input_ids=batch, attention_mask=mask, num_beams=3, max_new_tokens=4))
        return found

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        tokens = self.net.generate(input_ids=batch, attention_mask=torch.ones_like(batch), max_new_tokens=4)
        self.lengths.append(len(tokens[0].tolist()))
        self.log("sum", tokens.sum().double(), batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[Tensor]:
        return self.generated(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Static(Generates):
    """Keeps keys and values in tensors of fixed size, which layers change in place, as the count of tokens in them."""

    def generated(self, batch: Tensor) -> list[Tensor]:
        options = {"attention_mask": torch.ones_like(batch), "cache_implementation": "static", "max_new_tokens": 5}
        return [self.net.generate(input_ids=batch, **options)]


class Streamed(T.generation.streamers.BaseStreamer):
    """Keeps the tokens that come."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append([])


class Pushes(T.LogitsProcessor):
    """Pushes a token, the more the more often it is called; also ends behind the first sequence's even tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 7] += 0.1 * self.calls + float(scores[0, 3])
        return scores

    def stops(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(ids),), int(ids[0, -1]) % 2 == 0 and self.calls > 1)


class Decodes(Generates):
    """Decodes in rarer ways."""

    def __init__(self, kind: str = "llama") -> None:
        super().__init__(kind)
        self.draft = network(kind)
        for parameter in self.draft.parameters():
            nn.init.normal_(parameter, std=0.4)

    def generated(self, batch: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        one = {"input_ids": batch[:1], "attention_mask": torch.ones_like(batch[:1]), "max_new_tokens": 5}
        every = one | {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        streamer, pushes = Streamed(), Pushes()
        own = {"logits_processor": [pushes], "stopping_criteria": [pushes.stops], "streamer": streamer}
        states = self.net.generate(**every, output_hidden_states=True, return_dict_in_generate=True).hidden_states
        found = [self.net.generate(**one, assistant_model=self.draft, do_sample=True) for _ in range(2)]
        found += [
            self.net.generate(**one, **own, do_sample=True),
            torch.tensor([token for tokens in streamer.tokens for token in tokens]),
        ]
        found += [self.net.generate(**every, num_beams=3, num_return_sequences=2) for _ in range(2)]
        found += [torch.tensor([len(states), *map(len, states)])]
        return [*found, self.net.generate(**every, do_sample=True, num_return_sequences=2)]


def rows() -> DataLoader[Tensor]:
    return DataLoader(torch.randint(3, 61, (2, 5), generator=torch.Generator().manual_seed(1)), batch_size=2)


def tokens(trainer: L.Trainer, module: Generates) -> list[Any]:
    return [[each.tolist() for each in batch] for batch in trainer.predict(module, rows()) or ()]


def predicted(process: int, devices: int, kind: type[Generates]) -> list[Any]:
    strategy: Any = PipeStrategy(layers=LAYERS["llama"]) if devices > 1 else "auto"
    return tokens(L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **QUIET), kind("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [(Static, 2), (Decodes, 2), (Decodes, 4)])
def test_a_static_cache_and_rarer_ways_of_decoding_give_the_tokens_of_one_device(
    kind: type[Generates], ranks: int
) -> None:
    assert run_trainers(predicted, ranks, timeout=100, devices=ranks, kind=kind) == [predicted(0, 1, kind)] * ranks


def generate(process: int, kind: str, devices: int, fits: bool = False, plain: bool = False) -> Any:
    """What validation logs and keeps, and what prediction returns."""
    module = Generates(kind)
    strategy: Any = "auto" if plain else PipeStrategy(layers=LAYERS[kind], micro_batches=2, compare_losses=False)
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **QUIET)
    if fits:  # from its first batch on the ranks hold what they use
        trainer.fit(module, rows())
    trainer.validate(module, rows(), verbose=False)
    return float(trainer.callback_metrics["sum"]), module.lengths, tokens(trainer, module)


CASES = [(kind, ranks, fits) for kind in LAYERS for ranks in (2, 4) for fits in (False, True)]


@pytest.mark.parametrize(("kind", "ranks", "fits"), slow_but(CASES, ("gpt2", 2, True)))
def test_the_tokens_are_those_of_one_device(kind: str, ranks: int, fits: bool) -> None:
    expected = generate(0, kind, 1, fits, plain=True)
    assert expected[2][0][0] != expected[2][0][2]  # sampling makes a difference
    assert run_trainers(generate, ranks, timeout=60, kind=kind, devices=ranks, fits=fits) == [expected] * ranks
