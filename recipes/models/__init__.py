"""The models of the papers as plain modules. None of them knows about training, Lightning or pipelines."""

from recipes.models.amoebanet import AmoebaNet
from recipes.models.bert import bert, bert48
from recipes.models.gpipe_transformer import GPipeTransformer
from recipes.models.gpt2 import gpt2, gpt2_chimera
from recipes.models.nmt import NMTTransformer
from recipes.models.resnet import resnet101
from recipes.models.unet import UNet

__all__ = [
    "AmoebaNet",
    "GPipeTransformer",
    "NMTTransformer",
    "UNet",
    "bert",
    "bert48",
    "gpt2",
    "gpt2_chimera",
    "resnet101",
]
