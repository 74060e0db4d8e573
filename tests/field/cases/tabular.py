"""Tables with numbers and categories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.field.wrapping import BATCH, STEPS, Case, Wrapped, label, samples, single

NUMBERS, CATEGORIES, CLASSES = 4, (4, 3), 3


def _features() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The columns as deeptab describes them: numbers, categories, embeddings."""
    numbers = {f"n{index}": {"dimension": 1} for index in range(NUMBERS)}
    return numbers, {f"c{index}": {"dimension": 1, "categories": count} for index, count in enumerate(CATEGORIES)}, {}


def deeptab_rows() -> DataLoader:
    def sample() -> Any:
        numbers = [torch.randn(1) for _ in range(NUMBERS)]
        return (numbers, [label(count, 1) for count in CATEGORIES], []), torch.randn(1)

    return samples(sample)


def deeptab_network() -> nn.Module:
    from deeptab.architectures.ft_transformer import FTTransformer
    from deeptab.configs import FTTransformerConfig

    return FTTransformer(_features(), config=FTTransformerConfig(**_FT_TRANSFORMER))


_FT_TRANSFORMER = {"d_model": 32, "n_layers": 4, "n_heads": 4, "attn_dropout": 0.0, "ff_dropout": 0.0}


def _deeptab(network: type, config: Any) -> Case:
    from deeptab.training import TaskModel

    module = TaskModel(network, config, _features(), lr=1e-3, weight_decay=1e-6, scheduler_type=None)
    return Case(module, deeptab_rows())


def deeptab_resnet() -> Case:
    from deeptab.architectures.resnet import ResNet
    from deeptab.configs import ResNetConfig

    return _deeptab(ResNet, ResNetConfig(layer_sizes=[64, 64, 32], dropout=0.0, num_blocks=3))


def deeptab_ft_transformer() -> Case:
    from deeptab.architectures.ft_transformer import FTTransformer
    from deeptab.configs import FTTransformerConfig

    return _deeptab(FTTransformer, FTTransformerConfig(**_FT_TRANSFORMER))


def rtdl_ft_transformer() -> Case:
    from rtdl_revisiting_models import FTTransformer

    net = FTTransformer(
        n_cont_features=NUMBERS, cat_cardinalities=list(CATEGORIES), d_out=CLASSES, n_blocks=3, d_block=32,
        attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0,
        residual_dropout=0.0,
    )  # fmt: skip

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        numbers, categories, target = batch
        return nn.functional.cross_entropy(net(numbers, categories), target)

    def sample() -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(NUMBERS), torch.cat([label(count, 1) for count in CATEGORIES]), label(CLASSES)

    return Case(Wrapped(net, loss), samples(sample))


def _framed(network: type, **options: Any) -> Case:
    """A table of torch_frame, whose batches are tensor frames."""
    import pandas
    import torch_frame

    rows = STEPS * BATCH
    frame = pandas.DataFrame({f"n{index}": torch.randn(rows).numpy() for index in range(NUMBERS)})
    for index, count in enumerate(CATEGORIES):
        frame[f"c{index}"] = label(count, rows).numpy()
    frame["y"] = label(CLASSES, rows).numpy()
    kinds = {name: torch_frame.numerical if name[0] == "n" else torch_frame.categorical for name in frame}
    data = torch_frame.data.Dataset(frame, kinds, target_col="y").materialize()
    net = network(
        out_channels=CLASSES, col_stats=data.col_stats, col_names_dict=data.tensor_frame.col_names_dict, **options
    )
    module = Wrapped(net, lambda net, batch: nn.functional.cross_entropy(net(batch), batch.y))
    return Case(module, torch_frame.data.DataLoader(data.tensor_frame, batch_size=BATCH))


@single
def frame_resnet() -> Case:
    from torch_frame.nn import ResNet

    return _framed(ResNet, channels=16, num_layers=4, dropout_prob=0.0)


@single
def frame_tab_transformer() -> Case:
    from torch_frame.nn import TabTransformer

    return _framed(
        TabTransformer, channels=16, num_layers=3, num_heads=2, encoder_pad_size=2, attn_dropout=0.0, ffn_dropout=0.0
    )


def uq_regression() -> Case:
    from lightning_uq_box.models import MLP
    from lightning_uq_box.uq_methods import MVERegression

    module = MVERegression(MLP(n_inputs=NUMBERS, n_hidden=[32, 32, 32], n_outputs=2), burnin_epochs=0)
    return Case(module, samples(lambda: {"input": torch.randn(NUMBERS), "target": torch.randn(1)}))
