"""The typed configuration of every recipe's own parts; `recipes.config` has what all runs share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# ------------------------------------------------------------------ data


@dataclass
class TextBlocks:
    """Arguments of `recipes.data.text.TextBlocks`, which documents them."""

    _target_: str = "recipes.data.text.TextBlocks"
    source: str = "auto"
    files: str | None = None
    name: str = MISSING
    configuration: str = MISSING
    vocabulary: int = MISSING
    tokenizer: str | None = None
    block_length: int = MISSING
    batch_size: int = MISSING
    cache: str = MISSING
    seed: int = 1
    workers: int = 0


@dataclass
class ImageFolder:
    """Arguments of `recipes.data.images.ImageFolder`, which documents them."""

    _target_: str = "recipes.data.images.ImageFolder"
    source: str = "auto"
    files: str | None = None
    name: str = MISSING
    image_size: int = MISSING
    crop_area: list[float] = field(default_factory=lambda: [0.05, 1.0])
    flip: bool = True
    cutout: int = 0
    noise: float = 0.0
    batch_size: int = MISSING
    classes: int = MISSING
    seed: int = 1
    workers: int = 0


@dataclass
class MaskedPairs:
    """Arguments of `recipes.data.segment_pairs.MaskedPairs`, which documents them."""

    _target_: str = "recipes.data.segment_pairs.MaskedPairs"
    source: str = "auto"
    files: str | None = None
    name: str = MISSING
    configuration: str = MISSING
    documents: int | None = None
    vocabulary: int = MISSING
    tokenizer: str | None = None
    length: int = MISSING
    masked: float = 0.15
    batch_size: int = MISSING
    cache: str = MISSING
    seed: int = 1
    workers: int = 0


@dataclass
class ParallelText:
    """Arguments of `recipes.data.translation.ParallelText`, which documents them."""

    _target_: str = "recipes.data.translation.ParallelText"
    source: str = "auto"
    files: str | None = None
    name: str = MISSING
    pairs: list[str] = MISSING
    temperature: float = MISSING
    vocabulary: int = MISSING
    tokenizer: str | None = None
    length: int = MISSING
    batch_size: int = MISSING
    cache: str = MISSING
    seed: int = 1
    workers: int = 0


# ------------------------------------------------------------------ models


@dataclass
class GPT2:
    """Arguments of `recipes.modules.gpt2.GPT2`, which documents them."""

    _target_: str = "recipes.modules.gpt2.GPT2"
    vocabulary: int = MISSING
    positions: int = MISSING
    width: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    dropout: float = 0.1
    tied: bool = True
    weight_decay: float = MISSING


@dataclass
class AmoebaNet:
    """Arguments of `recipes.modules.amoebanet.AmoebaNetClassifier`, which documents them."""

    _target_: str = "recipes.modules.amoebanet.AmoebaNetClassifier"
    network: str = MISSING
    layers: int = MISSING
    filters: int = MISSING
    classes: int = MISSING
    wiring: str = "tpu"
    dropout: float = 0.5
    drop_path: float = 0.3
    norm_eps: float = 1e-3
    norm_momentum: float = 3e-4
    label_smoothing: float = 0.1
    auxiliary_weight: float = 0.4
    image_size: int = MISSING
    weight_decay: float = 4e-5


@dataclass
class ResNet:
    """Arguments of `recipes.modules.resnet.ResNetClassifier`, which documents them."""

    _target_: str = "recipes.modules.resnet.ResNetClassifier"
    blocks: list[int] = MISSING
    width: int = MISSING
    classes: int = MISSING
    label_smoothing: float = 0.0
    weight_decay: float = 1e-4


@dataclass
class UNet:
    """Arguments of `recipes.modules.unet.Denoiser`, which documents them."""

    _target_: str = "recipes.modules.unet.Denoiser"
    convolutions: int = MISSING
    channels: int = MISSING
    depth: int = 5
    weight_decay: float = MISSING


@dataclass
class TransformerLM:
    """Arguments of `recipes.modules.gpipe_transformer.TransformerLM`, which documents them."""

    _target_: str = "recipes.modules.gpipe_transformer.TransformerLM"
    layers: int = MISSING
    vocabulary: int = MISSING
    positions: int = MISSING
    width: int = 2048
    inner: int = 8192
    heads: int = 32
    dropout: float = 0.1
    weight_decay: float = MISSING


@dataclass
class BERT:
    """Arguments of `recipes.modules.bert.BERT`, which documents them."""

    _target_: str = "recipes.modules.bert.BERT"
    vocabulary: int = MISSING
    positions: int = MISSING
    width: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    dropout: float = 0.1
    weight_decay: float = MISSING


@dataclass
class Translator:
    """Arguments of `recipes.modules.nmt.Translator`, which documents them."""

    _target_: str = "recipes.modules.nmt.Translator"
    layers: int = MISSING
    inner: int = MISSING
    heads: int = MISSING
    vocabulary: int = MISSING
    width: int = 1024
    head_size: int = 64
    positions: int = MISSING
    dropout: float = 0.1
    logit_limit: float | None = None
    label_smoothing: float = 0.1
    weight_decay: float = MISSING


# ------------------------------------------------------------------ optimization


@dataclass
class AdamW:
    """Arguments of `torch.optim.AdamW`."""

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass
class SGD:
    """Arguments of `recipes.optimizers.sgd`, which documents them."""

    _target_: str = "recipes.optimizers.sgd"
    _partial_: bool = True
    lr: float = MISSING
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    betas: Any = None
    eps: Any = None


@dataclass
class RMSPropTF:
    """Arguments of `recipes.optimizers.RMSPropTF`, which documents them."""

    _target_: str = "recipes.optimizers.RMSPropTF"
    _partial_: bool = True
    lr: float = MISSING
    decay: float = 0.9
    momentum: float = 0.9
    eps: float = 1.0


@dataclass
class WarmupCosine:
    """Arguments of `recipes.optim.warmup_cosine`."""

    _target_: str = "recipes.optim.warmup_cosine"
    _partial_: bool = True
    warmup: float = 0.1
    floor: float = 0.1


@dataclass
class WarmupLinear:
    """Arguments of `recipes.schedules.warmup_linear`."""

    _target_: str = "recipes.schedules.warmup_linear"
    _partial_: bool = True
    warmup: float = 0.1


@dataclass
class WarmupExponential:
    """Arguments of `recipes.schedules.warmup_exponential`."""

    _target_: str = "recipes.schedules.warmup_exponential"
    _partial_: bool = True
    epochs: float = MISSING
    warmup: float = 3.0
    every: float = 2.4
    rate: float = 0.97
    floor: float = 1e-4


@dataclass
class WarmupMilestones:
    """Arguments of `recipes.schedules.warmup_milestones`."""

    _target_: str = "recipes.schedules.warmup_milestones"
    _partial_: bool = True
    epochs: float = MISSING
    warmup: float = 4.0
    milestones: list[float] = field(default_factory=lambda: [30.0, 60.0, 80.0])
    rate: float = 0.1


@dataclass
class InverseSquareRoot:
    """Arguments of `recipes.schedules.inverse_square_root`."""

    _target_: str = "recipes.schedules.inverse_square_root"
    _partial_: bool = True
    warmup: int = 4000


# Configuration files name their schema in their defaults list, as `/schema/<group>@_here_: <name>`.
SCHEMAS: dict[tuple[str, str], Any] = {
    ("schema/data", "text"): TextBlocks,
    ("schema/data", "images"): ImageFolder,
    ("schema/data", "masked_pairs"): MaskedPairs,
    ("schema/data", "parallel_text"): ParallelText,
    ("schema/model", "gpt2"): GPT2,
    ("schema/model", "amoebanet"): AmoebaNet,
    ("schema/model", "resnet"): ResNet,
    ("schema/model", "unet"): UNet,
    ("schema/model", "gpipe_transformer"): TransformerLM,
    ("schema/model", "bert"): BERT,
    ("schema/model", "nmt"): Translator,
    ("schema/optim", "adamw"): AdamW,
    ("schema/optim", "rmsprop"): RMSPropTF,
    ("schema/optim", "sgd"): SGD,
    ("schema/scheduler", "warmup_cosine"): WarmupCosine,
    ("schema/scheduler", "warmup_linear"): WarmupLinear,
    ("schema/scheduler", "warmup_exponential"): WarmupExponential,
    ("schema/scheduler", "warmup_milestones"): WarmupMilestones,
    ("schema/scheduler", "inverse_square_root"): InverseSquareRoot,
}
