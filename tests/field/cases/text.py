"""Networks that read and write text: encoders, causal language models, encoder-decoders."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from lightning.pytorch.demos import LightningTransformer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.field.wrapping import Case, Wrapped, label, own_loss, quiet, samples, single

WORDS, LENGTH = 64, 12
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL |= {"max_position_embeddings": 64}
_VOCABULARY = [f"w{letter}{other}" for letter in "abcdefg" for other in "abcdefg"]


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (length,))


def masked(**more: Tensor) -> dict[str, Tensor]:
    """A text with its attention mask: samples are padded to the same length at their ends."""
    mask = torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, ())
    return {"input_ids": words().where(mask, torch.tensor(1)), "attention_mask": mask.long(), **more}


def bert() -> Case:
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3))
    return Case(Wrapped(net, own_loss), samples(lambda: masked(labels=label(3))))


def roberta() -> Case:
    net = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL))
    return Case(Wrapped(net, own_loss), samples(lambda: masked(labels=words())))


def deberta() -> Case:
    config = transformers.DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, num_labels=5
    )
    net = transformers.DebertaV2ForTokenClassification(config)
    return Case(Wrapped(net, own_loss), samples(lambda: masked(labels=label(5, LENGTH))))


def cross_encoder() -> Case:
    import lightning_ir
    from lightning_ir.models import MonoConfig

    loss = lightning_ir.RankNet()
    module = lightning_ir.CrossEncoderModule(small_bert(), MonoConfig(), loss_functions=[loss])
    return Case(module.set_optimizer(torch.optim.AdamW, lr=1e-3), ranked())


class _Pairs:
    """The tokenizers of a configuration, slow and fast, as Transformers 4 had them and lightning-ir looks for them."""

    def __getitem__(self, config: type) -> tuple[type, type]:
        return (transformers.TOKENIZER_MAPPING[config],) * 2


def small_bert() -> str:
    """A folder with a small BERT and its tokenizer."""
    from lightning_ir.base import class_factory, tokenizer
    from transformers.models.bert import BertTokenizer

    tokenizer.TOKENIZER_MAPPING = class_factory.TOKENIZER_MAPPING = _Pairs()
    folder = tempfile.mkdtemp()
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(folder)
    (Path(folder) / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_VOCABULARY]))
    BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def ranked(documents: int = 2) -> DataLoader:
    """Queries with documents and their relevance, as lightning-ir's data module makes them."""
    import lightning_ir

    def text(length: int) -> str:
        return " ".join(_VOCABULARY[int(word)] for word in torch.randint(len(_VOCABULARY), (length,)))

    def sample() -> lightning_ir.RankSample:
        targets = torch.arange(float(documents)).flip(0)
        docs = tuple(text(8) for _ in range(documents))
        return lightning_ir.RankSample("q", text(4), tuple("ab"[:documents]), docs, targets)

    collated = lightning_ir.LightningIRDataModule(num_workers=0, train_dataset=None)._collate_fn
    return samples(sample, lambda drawn: collated(drawn))


def lightning_transformer() -> Case:
    module = quiet(LightningTransformer(vocab_size=WORDS))
    module.prepare_data = lambda: None  # it downloads a text
    return Case(module, samples(lambda: (words(), words())))


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=4, n_head=4, n_positions=64, embd_pdrop=0.0, attn_pdrop=0.0,
        resid_pdrop=0.0,
    )  # fmt: skip
    return Case(Wrapped(transformers.GPT2LMHeadModel(config), own_loss), samples(_continued))


def llama() -> Case:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return Case(Wrapped(transformers.LlamaForCausalLM(config), own_loss), samples(_continued))


@single  # its experts multiply in single precision
def mixtral() -> Case:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return Case(Wrapped(transformers.MixtralForCausalLM(config), own_loss), samples(_continued))


def _continued() -> dict[str, Tensor]:
    text = words()
    return {"input_ids": text, "labels": text}


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Case(Wrapped(transformers.T5ForConditionalGeneration(config), own_loss), samples(_translated))


def bart() -> Case:
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, max_position_embeddings=64,
    )  # fmt: skip
    return Case(Wrapped(transformers.BartForConditionalGeneration(config), own_loss), samples(_translated))


def _translated() -> dict[str, Tensor]:
    return masked(labels=words(9))


def whisper() -> Case:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=16, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    net = transformers.WhisperForConditionalGeneration(config)
    return Case(Wrapped(net, own_loss), samples(lambda: {"input_features": torch.randn(16, 40), "labels": words(9)}))
