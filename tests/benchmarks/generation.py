"""Tokens per second of ``generate()`` in ``predict_step``: a pipeline, whose ranks take turns, beside one device."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.oracle import SILENT
from tests.support.trainer_runs import quiet

LAYERS, WIDTH, SAMPLES, PROMPT = 8, 512, 4, 16


class Generates(L.LightningModule):
    """A GPT-2 of random weights, 27 million parameters."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 8, "vocab_size": 4096, "n_positions": 128}
        special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
        self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special))
        self.tokens, self.seconds = tokens, [0.0]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        start = time.perf_counter()
        options = {"attention_mask": torch.ones_like(batch), "do_sample": False, "max_new_tokens": self.tokens}
        found: Tensor = self.net.generate(input_ids=batch, **options)  # type: ignore[attr-defined]
        self.seconds = [*self.seconds, time.perf_counter() - start]
        return found


def predict(process: int, ranks: int, tokens: int) -> tuple[float, list[Any]]:
    """Tokens per second of the fastest batch but the first, and the tokens."""
    quiet()
    rows = torch.randint(2, 4096, (4 * SAMPLES, PROMPT), generator=torch.Generator().manual_seed(1))
    options: Any = {"strategy": PipeStrategy(layers="net.transformer.h")} if ranks > 1 else {}
    trainer = L.Trainer(accelerator="cpu", devices=ranks, **SILENT, **options)
    module = Generates(tokens)
    found = trainer.predict(module, DataLoader(rows, batch_size=SAMPLES))
    return SAMPLES * tokens / min(module.seconds[2:]), [each.tolist() for each in found or ()]


def run(quick: bool) -> list[Finding]:
    """Tokens per second, in all: the rounds on one device and on a pipeline alternate."""
    tokens = 8 if quick else 32
    findings = []
    for ranks in (2,) if quick else (2, 4):
        rates: dict[int, float] = {}
        texts: dict[int, Any] = {}
        for _ in range(1 if quick else 3):
            for devices in (1, ranks):
                outcomes = processes.outcomes(predict, devices, timeout=600, ranks=devices, tokens=tokens)
                assert all(each.error is None for each in outcomes), outcomes[0].error
                rate, texts[devices] = outcomes[0].value
                rates[devices] = max(rate, rates.get(devices, 0.0))
        assert texts[ranks] == texts[1]
        value = f"{rates[ranks]:.1f}, on one device {rates[1]:.1f}"
        findings.append(Finding(f"tokens per second of generate(), {ranks} ranks", value))
    return findings
