"""Small instances of every model: shapes, gradients, and what makes each of them what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from recipes.models import (
    AmoebaNet,
    GPipeTransformer,
    NMTTransformer,
    UNet,
    bert,
    gpt2,
    resnet101,
)
from recipes.models.amoebanet_parts import OPERATIONS, DropPath, FactorizedReduction, batch_norm
from recipes.models.genotypes import AMOEBANET_B, AMOEBANET_D, Genotype

TOKENS = torch.arange(24).reshape(2, 12) % 20
NORM = batch_norm(1e-5, 0.1)

small_gpt2 = partial(gpt2, vocabulary=20, positions=16, width=32, layers=4, heads=2, dropout=0.0)
small_bert = partial(bert, vocabulary=20, positions=16, width=32, layers=4, heads=2, dropout=0.0)
small_lm = partial(GPipeTransformer, 3, vocabulary=20, width=16, inner=32, heads=2, dropout=0.0)
small_nmt = partial(NMTTransformer, 2, 64, 2, vocabulary=20, width=16, head_size=8, dropout=0.0)


@pytest.mark.parametrize(
    ("make", "inputs", "shape"),
    [
        (partial(AmoebaNet, "d", 3, 16, 7), (torch.ones(2, 3, 32, 32),), (2, 7)),
        (partial(AmoebaNet, "d", 3, 16, 7, wiring="tpu"), (torch.ones(2, 3, 32, 32),), (2, 7)),
        (partial(AmoebaNet, "b", 3, 16, 7), (torch.ones(2, 3, 32, 32),), (2, 7)),
        (partial(AmoebaNet, "b", 6, 16, 7, wiring="tpu"), (torch.ones(2, 3, 45, 45),), (2, 7)),
        (partial(resnet101, 7, blocks=(1, 1, 2, 1), width=8), (torch.ones(2, 3, 32, 32),), (2, 7)),
        (partial(UNet, 2, 4, depth=3), (torch.rand(2, 3, 16, 16),), (2, 1, 16, 16)),
        (small_lm, (TOKENS,), (2, 12, 20)),
        (small_nmt, (TOKENS, TOKENS[:, :9], torch.ones(2, 12, dtype=torch.bool)), (2, 9, 20)),
    ],
)
def test_forward_and_backward(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = make()
    output = model(*inputs)
    assert output.shape == shape
    output.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ------------------------------------------------------------------ AmoebaNet


@pytest.mark.parametrize("genotype", [AMOEBANET_B, AMOEBANET_D])
def test_genotypes_use_every_state(genotype: Genotype) -> None:
    for plan in genotype:
        assert len(plan.steps) == 10
        for index, step in enumerate(plan.steps):
            assert step.operation in OPERATIONS
            assert step.state < 2 + index // 2, "a state is there before it is used"
        used = {step.state for step in plan.steps} | set(plan.output)
        assert used == set(range(7))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("side", [7, 8])
@pytest.mark.parametrize("outputs", [16, 32])
def test_all_operations_agree_on_the_size(name: str, side: int, outputs: int) -> None:
    for stride in (2,) if name == "max2" else (1, 2):  # max2 occurs only where the image is halved
        operation = OPERATIONS[name](16, outputs, stride, NORM)
        assert operation(torch.rand(2, 16, side, side)).shape == (2, outputs, -(-side // stride), -(-side // stride))


def test_factorised_reduction_sees_every_second_pixel_twice_over() -> None:
    reduce = FactorizedReduction(1, 2, nn.Identity)  # type: ignore[arg-type]
    for convolution in (reduce.here, reduce.shifted):
        nn.init.ones_(convolution.weight)
    reduce.norm = nn.Identity()
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert reduce(image).tolist() == [[[[0, 2], [8, 10]], [[5, 7], [13, 15]]]]


def test_cells_hand_on_their_own_output_and_the_last_one() -> None:
    model = AmoebaNet("d", 3, 16, 7)
    first = model.layers[0](torch.rand(2, 3, 32, 32))
    assert first[0] is first[1]
    second = model.layers[1](first)
    assert second[1] is first[0]
    assert second[0].shape == (2, 3 * 8, 8, 8)


def test_the_auxiliary_head_is_for_training_only() -> None:
    model = AmoebaNet("b", 6, 16, 7, wiring="tpu", auxiliary_for=64)
    images = torch.rand(2, 3, 64, 64)
    logits, auxiliary = model(images)
    assert logits.shape == auxiliary.shape == (2, 7)
    assert isinstance(model.eval()(images), Tensor)
    # stem, 2 reductions, 2 normal, reduction, 2 normal: the last one before the second reduction between groups
    assert model.auxiliary_after == 7


def test_drop_path_keeps_whole_samples_and_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath()
    images = torch.ones(2000, 2, 2, 2)
    assert drop(images) is images
    drop.keep = 0.7
    dropped = drop(images)
    values = dropped.flatten(1)
    assert (values == values[:, :1]).all()
    assert sorted({round(value, 4) for value in values[:, 0].tolist()}) == [0.0, round(1 / 0.7, 4)]
    assert dropped.mean() == pytest.approx(1.0, abs=0.05)
    assert drop.eval()(images) is images


def test_cells_never_drop_what_is_passed_on_unchanged() -> None:
    cell = AmoebaNet("d", 3, 16, 7).layers[3]
    dropping = [isinstance(drop, DropPath) for drop in cell.drop_paths]  # type: ignore[union-attr]
    assert dropping == [step.operation != "none" for step in AMOEBANET_D.normal.steps]


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="layers=4"):
        AmoebaNet("d", 4, 16)
    with pytest.raises(ValueError, match="filters=20"):
        AmoebaNet("d", 3, 20)


# ------------------------------------------------------------------ Transformers


@pytest.mark.parametrize("make", [small_gpt2, small_lm])
def test_language_models_do_not_look_ahead(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    changed = TOKENS.clone()
    changed[:, 8] = 3
    one, other = (getattr(out, "logits", out) for out in (model(TOKENS), model(changed)))
    assert torch.allclose(one[:, :8], other[:, :8], atol=1e-6)
    assert not torch.allclose(one[:, 8:], other[:, 8:], atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_is_tied_only_if_asked(tied: bool) -> None:
    model = small_gpt2(tied=tied)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied


def test_bert_has_both_heads_and_matrices_of_its_own() -> None:
    model = small_bert()
    output = model(TOKENS)
    assert output.prediction_logits.shape == (2, 12, 20)
    assert output.seq_relationship_logits.shape == (2, 2)
    assert model.cls.predictions.decoder.weight is not model.bert.embeddings.word_embeddings.weight
    (output.prediction_logits.sum() + output.seq_relationship_logits.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_translator_looks_back_in_the_target_and_everywhere_in_the_source() -> None:
    model = small_nmt().eval()
    mask = torch.ones(2, 12, dtype=torch.bool)
    whole = model(TOKENS, TOKENS, mask)
    later = TOKENS.clone()
    later[:, 8] = 3
    assert torch.allclose(model(TOKENS, later, mask)[:, :8], whole[:, :8], atol=1e-6)
    assert not torch.allclose(model(later, TOKENS, mask)[:, 0], whole[:, 0], atol=1e-6)


def test_the_translator_ignores_padding() -> None:
    model = small_nmt().eval()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, 9:] = False
    padded = TOKENS.clone()
    padded[:, 9:] = 0
    alone = model(TOKENS[:, :9], TOKENS, mask[:, :9])
    assert torch.allclose(model(padded, TOKENS, mask), alone, atol=1e-6)


def test_feed_forward_layers_start_smaller_in_deeper_models() -> None:
    models = [NMTTransformer(layers, 256, 4, vocabulary=20, width=64, head_size=16) for layers in (2, 8)]
    spread = [
        {name: float(part.weight.detach().std()) for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        for model in models
    ]
    first = "layers.0.feed_forward.0"
    assert spread[0][first] / spread[1][first] == pytest.approx(4, rel=0.05)
    other = "layers.0.attention.output"
    assert spread[0][other] == pytest.approx(spread[1][other], rel=0.05)


def test_logits_are_clipped_while_training() -> None:
    model = small_nmt(logit_limit=0.01)
    mask = torch.ones(2, 12, dtype=torch.bool)
    assert model(TOKENS, TOKENS, mask).abs().max() <= 0.01
    assert model.eval()(TOKENS, TOKENS, mask).abs().max() > 0.01


def test_embeddings_are_shared_between_source_and_target_if_asked() -> None:
    one, two = small_nmt(), small_nmt(shared_embeddings=False)
    assert one.target_embedding is one.embedding
    assert two.target_embedding is not two.embedding


# ------------------------------------------------------------------ U-Net


def test_the_unet_carries_details_past_its_bottleneck() -> None:
    torch.manual_seed(0)
    model = UNet(1, 4, depth=2).eval()
    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    model(image)[0, 0, 3, 3].backward()
    assert image.grad is not None
    assert image.grad[0, :, 3, 3].abs().sum() > 0
