"""Tokenisers with named special tokens: a byte-level BPE trained on the data, or a ready one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.errors import RecipeError

FOLDER = "tokenizer"
Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Vocabulary:
    """A tokeniser.

    Args:
        size: number of tokens.
        encode: texts to token numbers, without special tokens.
        decode: token numbers to text, special tokens left out.
        special: numbers of the special tokens by their role.
    """

    size: int
    encode: Encode
    decode: Callable[[Sequence[int]], str]
    special: Mapping[str, int]


def train(texts: Iterable[str], size: int, special: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE.

    Args:
        texts: what to train on.
        size: number of tokens, special ones and the 256 bytes included.
        special: special tokens by role; they get the first numbers.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    roles = {f"{role}_token": token for role, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **roles)


def make(
    texts: Iterable[str], size: int, tokenizer: str | None, special: Mapping[str, str], folder: Path
) -> Vocabulary:
    """Leaves a tokeniser in a folder, and opens it.

    Args:
        texts: what a new one is trained on.
        size: number of tokens of a new one.
        tokenizer: a ready one instead, by its name on the hub or its folder.
        special: special tokens by role; see `load`.
        folder: existing.
    """
    try:
        made = train(texts, size, special) if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    except OSError as error:
        raise RecipeError(
            f"The tokeniser {tokenizer} cannot be read: {str(error).splitlines()[0]}",
            hint="Name another one, or leave out data.tokenizer to train one on the data.",
        ) from error
    made.save_pretrained(folder / FOLDER)
    return load(folder, special)


def check_size(size: int, built_for: int) -> None:
    """Refuses a tokeniser with more tokens than the model is built for."""
    if size > built_for:
        raise RecipeError(
            f"The tokeniser has {size} tokens, the model is built for {built_for}.",
            hint=f"Set data.vocabulary={size}.",
        )


def load(folder: Path, special: Mapping[str, str]) -> Vocabulary:
    """Opens the tokeniser that `make` has left.

    Args:
        folder: where it is.
        special: special tokens by role, which are those of transformers, such as "pad", "cls", "sep", "mask", "bos",
            "eos". A ready tokeniser has its own tokens for them.
    """
    made = AutoTokenizer.from_pretrained(folder / FOLDER)
    known: dict[str, Any] = {role: getattr(made, f"{role}_token_id") for role in special}
    numbers = {role: number for role, number in known.items() if number is not None}
    if missing := [role for role in special if role not in numbers]:
        raise RecipeError(
            f"The tokeniser has no {missing[0]} token.", hint="Name another one, or leave out data.tokenizer."
        )
    return Vocabulary(
        size=len(made),
        encode=lambda texts: made(texts, add_special_tokens=False, verbose=False)["input_ids"],
        decode=lambda ids: str(made.decode(list(ids), skip_special_tokens=True)),
        special=numbers,
    )
