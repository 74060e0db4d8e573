"""Networks that compare two of something: two towers, and self-supervision with two passes."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.field.cases import text
from tests.field.wrapping import Case, Wrapped, image, own_loss, samples

TEXTS = {"vocab_size": text.WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
TEXTS |= {"num_attention_heads": 4, "max_position_embeddings": 32}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGES |= {"image_size": 32, "patch_size": 8}


def bi_encoder() -> Case:
    import lightning_ir
    from lightning_ir.models import DprConfig

    losses = [lightning_ir.RankNet(), lightning_ir.InBatchCrossEntropy()]
    module = lightning_ir.BiEncoderModule(text.small_bert(), DprConfig(projection=None), loss_functions=losses)
    return Case(module.set_optimizer(torch.optim.AdamW, lr=1e-3), text.ranked())


def open_clip() -> Case:
    import open_clip

    net = open_clip.CLIP(
        32,
        open_clip.CLIPVisionCfg(layers=3, width=32, head_width=8, patch_size=8, image_size=32),
        open_clip.CLIPTextCfg(context_length=text.LENGTH, vocab_size=text.WORDS, width=32, heads=4, layers=3),
    )
    criterion = open_clip.ClipLoss()
    module = Wrapped(net, lambda net, batch: criterion(*net(*batch)))
    return Case(module, samples(lambda: (image(32), text.words())))


def _captioned() -> dict[str, Any]:
    return {"input_ids": text.words(), "pixel_values": image(32), "return_loss": True}


def _together(drawn: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("input_ids", "pixel_values")
    return {key: torch.stack([one[key] for one in drawn]) for key in keys} | {"return_loss": True}


def clip() -> Case:
    config = transformers.CLIPConfig(text_config=TEXTS | {"eos_token_id": 2}, vision_config=IMAGES, projection_dim=32)
    return Case(Wrapped(transformers.CLIPModel(config), own_loss), samples(_captioned, _together))


def siglip() -> Case:
    config = transformers.SiglipConfig(text_config=TEXTS | {"projection_size": 32}, vision_config=IMAGES)
    return Case(Wrapped(transformers.SiglipModel(config), own_loss), samples(_captioned, _together))


def _views() -> DataLoader:
    """Two views of each image, one above the other, as torchgeo takes them."""
    return samples(lambda: {"image": image(32, channels=6)})


def torchgeo_simclr() -> Case:
    from torchgeo.trainers import SimCLRTask

    return Case(SimCLRTask("resnet18", hidden_dim=64, output_dim=32, lr=1e-2, augmentations=nn.Identity()), _views())


def torchgeo_byol() -> Case:
    from torchgeo.trainers import BYOLTask

    module = BYOLTask("resnet18")
    module.model.augment = nn.Identity()
    return Case(module, _views())


def torchgeo_moco() -> Case:
    from torchgeo.trainers import MoCoTask

    plain = nn.Identity()
    return Case(
        MoCoTask("resnet18", hidden_dim=64, output_dim=32, lr=1e-2, augmentation1=plain, augmentation2=plain), _views()
    )


def deeptab_contrastive() -> Case:
    from deeptab.training import ContrastivePretrainer

    from tests.field.cases.tabular import deeptab_network, deeptab_rows

    return Case(ContrastivePretrainer(deeptab_network(), k_neighbors=3), deeptab_rows())


def _backbone() -> nn.Module:
    return nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])


def _two_views() -> DataLoader:
    return samples(lambda: (image(32), image(32)))


def lightly_simsiam() -> Case:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models import SimSiam

    criterion = NegativeCosineSimilarity()

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (z0, p0), (z1, p1) = net(*batch)
        return 0.5 * (criterion(z0, p1) + criterion(z1, p0))

    net = SimSiam(_backbone(), num_ftrs=512, proj_hidden_dim=64, pred_hidden_dim=32, out_dim=64)
    return Case(Wrapped(net, loss), _two_views())


def lightly_barlow_twins() -> Case:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models import BarlowTwins

    criterion = BarlowTwinsLoss()
    net = BarlowTwins(_backbone(), num_ftrs=512, proj_hidden_dim=64, out_dim=64)
    return Case(Wrapped(net, lambda net, batch: criterion(*net(*batch))), _two_views())
