"""Networks for images: segmentation, classification with batch norm, vision transformers."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.field.wrapping import BATCH, Case, Wrapped, classified, image, label, samples, single

CLASSES = 5


# Some batches are long enough for two micro-batches that batch norm takes to be long enough.
LONG = 2 * BATCH


def _classes(size: int = BATCH) -> DataLoader:
    return samples(lambda: (image(32), label(CLASSES)), size=size)


def _masks(size: int = BATCH) -> DataLoader:
    return samples(lambda: (image(32), label(CLASSES, 32, 32)), size=size)


def torchgeo_segmentation() -> Case:
    from torchgeo.trainers import SemanticSegmentationTask

    module = SemanticSegmentationTask("unet", "resnet18", in_channels=3, num_classes=CLASSES)
    return Case(module, samples(lambda: {"image": image(32), "mask": label(CLASSES, 32, 32)}), validated=True)


def uncertain_segmentation() -> Case:
    from torch_uncertainty.models.segmentation import small_unet
    from torch_uncertainty.routines import SegmentationRoutine
    from torchvision.tv_tensors import Mask

    net = small_unet(3, CLASSES, bilinear=True)
    module = SegmentationRoutine(net, CLASSES, nn.CrossEntropyLoss(), optim_recipe=torch.optim.Adam(net.parameters()))
    return Case(module, samples(lambda: (image(32), label(CLASSES, 32, 32)), _with_masks(Mask)))


def _with_masks(kind: type) -> object:
    def collate(drawn: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        images, masks = zip(*drawn, strict=True)
        return torch.stack(images), kind(torch.stack(masks))

    return collate


def smp_unet() -> Case:
    import segmentation_models_pytorch as smp

    return Case(Wrapped(smp.Unet("resnet18", encoder_weights=None, classes=CLASSES), classified), _masks(LONG))


def smp_deeplab() -> Case:
    import segmentation_models_pytorch as smp

    net = smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=CLASSES)
    net.decoder.aspp[0].project[-1].p = 0.0
    return Case(Wrapped(net, classified), _masks())


def monai_unet() -> Case:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    net = UNet(
        spatial_dims=2, in_channels=3, out_channels=CLASSES, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
    )
    dice = DiceCELoss(to_onehot_y=True, softmax=True)
    return Case(Wrapped(net, lambda net, batch: dice(net(batch[0]), batch[1].unsqueeze(1))), _masks())


class Darkened(nn.Module):
    """Images and the places of their anomalies, without chance."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images * 0.9, (images[:, :1] > 0.7).to(images.dtype)


@single
def anomalib_draem() -> Case:
    from anomalib.data import ImageBatch
    from anomalib.models import Draem
    from anomalib.models.image.draem.torch_model import DiscriminativeSubNetwork, ReconstructiveSubNetwork

    # it takes the noise for its anomalies from pictures
    pictures = Path(tempfile.mkdtemp())
    torchvision.utils.save_image(image(32), pictures / "one.png")
    module = Draem(pictures, evaluator=False, post_processor=False, visualizer=False, pre_processor=False)
    module.augmenter = Darkened()
    module.model.reconstructive_subnetwork = ReconstructiveSubNetwork(base_width=16)
    module.model.discriminative_subnetwork = DiscriminativeSubNetwork(in_channels=6, out_channels=2, base_width=8)

    def together(drawn: list[Tensor]) -> ImageBatch:
        return ImageBatch(image=torch.stack(drawn), gt_label=torch.zeros(len(drawn), dtype=torch.long))

    return Case(module, samples(lambda: image(32).sigmoid(), together))


def torchgeo_resnet() -> Case:
    from torchgeo.trainers import ClassificationTask

    module = ClassificationTask("resnet18", in_channels=3, num_classes=CLASSES)
    return Case(module, samples(lambda: {"image": image(32), "label": label(CLASSES)}), validated=True)


def uncertain_resnet() -> Case:
    from torch_uncertainty.models.classification import resnet
    from torch_uncertainty.models.classification.resnet.std import ResNetStyle
    from torch_uncertainty.optim_recipes import optim_cifar10_resnet18
    from torch_uncertainty.routines import ClassificationRoutine

    net = resnet(3, CLASSES, arch=18, style=ResNetStyle.CIFAR, width_multiplier=0.25)
    module = ClassificationRoutine(net, CLASSES, nn.CrossEntropyLoss(), optim_recipe=optim_cifar10_resnet18(net))
    return Case(module, _classes(LONG))


def torchvision_resnet() -> Case:
    return Case(Wrapped(torchvision.models.resnet18(num_classes=CLASSES), classified), _classes(LONG))


def torchvision_densenet() -> Case:
    net = torchvision.models.DenseNet(16, (3, 4, 4), 32, num_classes=CLASSES)
    return Case(Wrapped(net, classified), _classes())


def timm_efficientnet() -> Case:
    net = timm.create_model("efficientnet_b0", num_classes=CLASSES)
    return Case(Wrapped(net, classified), _classes())


def torchgeo_vit() -> Case:
    from torchgeo.trainers import ClassificationTask

    module = ClassificationTask("test_vit", in_channels=3, num_classes=CLASSES)
    return Case(module, samples(lambda: {"image": image(160), "label": label(CLASSES)}), validated=True)


def timm_vit() -> Case:
    net = timm.models.VisionTransformer(
        img_size=32, patch_size=8, num_classes=CLASSES, embed_dim=48, depth=6, num_heads=4, global_pool="avg"
    )
    return Case(Wrapped(net, classified), _classes())


def timm_swin() -> Case:
    net = timm.models.SwinTransformer(
        img_size=32, patch_size=2, num_classes=CLASSES, embed_dim=24, depths=(2, 2, 2), num_heads=(2, 4, 8),
        window_size=4, drop_path_rate=0.0,
    )  # fmt: skip
    return Case(Wrapped(net, classified), _classes())


def torchvision_vit() -> Case:
    net = torchvision.models.VisionTransformer(32, 8, 6, 4, 48, 96, num_classes=CLASSES)
    nn.init.normal_(net.heads.head.weight, std=1 / math.sqrt(48))
    return Case(Wrapped(net, classified), _classes())
