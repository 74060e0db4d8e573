"""Time series: recurrent networks, attention, and networks of other kinds."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytorch_forecasting as forecasting
import torch
import transformers
from lightning.pytorch.demos.lstm import LightningLSTM
from pytorch_forecasting.metrics import MAE, SMAPE, QuantileLoss
from pytorch_forecasting.models.timexer import TimeXer
from pytorch_forecasting.models.xlstm import xLSTMTime
from torch import Tensor
from torch.utils.data import DataLoader

from tests.field.wrapping import BATCH, Case, Wrapped, own_loss, quiet, samples, single, typed

PAST, FUTURE = 16, 4


def _dataset(covariates: bool = True, **options: Any) -> forecasting.TimeSeriesDataSet:
    """Series with a category and a known covariate."""
    import pandas

    rows, groups = 30, 12
    values = torch.randn(groups, rows).cumsum(1) * 0.1 + 2
    frame = pandas.DataFrame(
        {
            "time": torch.arange(rows).repeat(groups).numpy(),
            "group": [f"g{number}" for number in range(groups) for _ in range(rows)],
            "value": values.flatten().double().numpy(),
            "price": torch.rand(groups * rows).double().numpy(),
        }
    )
    if covariates:
        options |= {"static_categoricals": ["group"], "time_varying_known_reals": ["time", "price"]}
    return forecasting.TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["group"], max_encoder_length=PAST,
        max_prediction_length=FUTURE, time_varying_unknown_reals=["value"], **options,
    )  # fmt: skip


def _case(kind: type, data: forecasting.TimeSeriesDataSet, **options: Any) -> Case:
    module: L.LightningModule = kind.from_dataset(data, learning_rate=1e-2, log_interval=-1, **options)
    loader = DataLoader(data, batch_size=BATCH, collate_fn=lambda drawn: typed(data._collate_fn(drawn)))
    return Case(quiet(module), loader)


def deepar() -> Case:
    loss = forecasting.NormalDistributionLoss()
    return _case(forecasting.DeepAR, _dataset(), hidden_size=16, rnn_layers=2, loss=loss)


def recurrent_network() -> Case:
    return _case(forecasting.RecurrentNetwork, _dataset(), cell_type="GRU", hidden_size=16, rnn_layers=2, loss=MAE())


def xlstm_time() -> Case:
    return _case(xLSTMTime, _dataset(covariates=False), input_size=1, hidden_size=16, output_size=1, loss=SMAPE())


def lightning_lstm() -> Case:
    def sample() -> tuple[Tensor, Tensor]:
        return torch.randint(64, (10,)), torch.randint(64, (10,))

    module = quiet(LightningLSTM(vocab_size=64))
    module.prepare_data = lambda: None  # it downloads a text
    return Case(module, samples(sample))


def temporal_fusion() -> Case:
    return _case(
        forecasting.TemporalFusionTransformer, _dataset(), hidden_size=16, attention_head_size=2,
        hidden_continuous_size=8, lstm_layers=1, loss=QuantileLoss(),
    )  # fmt: skip


def timexer() -> Case:
    return _case(
        TimeXer, _dataset(), context_length=PAST, prediction_length=FUTURE, hidden_size=32, n_heads=4,
        e_layers=2, d_ff=32, patch_length=4, loss=MAE(),
    )  # fmt: skip


def nbeats() -> Case:
    return _case(forecasting.NBeats, _dataset(covariates=False), widths=[16, 32], backcast_loss_ratio=0.1)


def nhits() -> Case:
    return _case(forecasting.NHiTS, _dataset(), hidden_size=32, loss=MAE())


def patchtst() -> Case:
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=PAST, prediction_length=FUTURE, patch_length=4, patch_stride=4, d_model=32,
        num_hidden_layers=3, num_attention_heads=4, ffn_dim=64, attention_dropout=0.0, ff_dropout=0.0, head_dropout=0.0,
    )  # fmt: skip

    def sample() -> dict[str, Tensor]:
        return {"past_values": torch.randn(PAST, 2), "future_values": torch.randn(FUTURE, 2)}

    return Case(Wrapped(transformers.PatchTSTForPrediction(config), own_loss), samples(sample))


@single
def autoformer() -> Case:
    config = transformers.AutoformerConfig(
        prediction_length=FUTURE, context_length=PAST, lags_sequence=[1, 2], num_time_features=1, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, moving_average=5,
    )  # fmt: skip

    def sample() -> dict[str, Tensor]:
        past = PAST + 2  # with the lags
        return {
            "past_values": torch.rand(past) + 1,
            "past_time_features": torch.randn(past, 1),
            "past_observed_mask": torch.ones(past),
            "future_values": torch.rand(FUTURE) + 1,
            "future_time_features": torch.randn(FUTURE, 1),
        }

    return Case(Wrapped(transformers.AutoformerForPrediction(config), own_loss), samples(sample))
