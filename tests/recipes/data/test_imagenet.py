"""ImageNet in small files of the formats in which it is distributed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from recipes.data import image_sources, imagenet
from recipes.data.images import decoded
from recipes.errors import RecipeError

CLASSES = ("n01440764", "n01443537", "n02128385")
VALIDATION = [2, 0, 1, 1, 2]  # the classes of five images
IDS = {0: 417, 1: 12, 2: 3}  # the devkit counts the classes in an order of its own


def jpeg(grey: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (40, 30), grey).save(content, "JPEG")
    return content.getvalue()


def tar(files: dict[str, bytes], mode: str = "w") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def grey(label: int, number: int) -> int:
    return 40 * label + 10 * number + 20


def train_images(label: int) -> dict[str, bytes]:
    return {f"{CLASSES[label]}_{number}.JPEG": jpeg(grey(label, number)) for number in range(2)}


def train_archive() -> bytes:
    return tar({f"{name}.tar": tar(train_images(label)) for label, name in enumerate(CLASSES)})


def validation_images() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{n:08}.JPEG": jpeg(grey(label, n)) for n, label in enumerate(VALIDATION, 1)}


def devkit() -> dict[str, bytes]:
    """The two files of the devkit that matter, below their folder."""
    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("num_children", "f8")]
    known = [(IDS[label], name, "a fish, a fish", 0) for label, name in enumerate(CLASSES)]
    synsets = np.array([*known, (1001, "n00001740", "entity", 3)], dtype=kinds)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets.reshape(-1, 1)})
    truth = "".join(f"{IDS[label]}\n" for label in VALIDATION).encode()
    folder = "ILSVRC2012_devkit_t12/data"
    return {f"{folder}/ILSVRC2012_validation_ground_truth.txt": truth, f"{folder}/meta.mat": meta.getvalue()}


KIT = tar(devkit(), "w:gz")
TRUTH, META = devkit()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def archives() -> dict[str, bytes]:
    return {
        "ILSVRC2012_img_train.tar": train_archive(),
        "ILSVRC2012_img_val.tar": tar(validation_images()),
        "ILSVRC2012_devkit_t12.tar.gz": KIT,
    }


def layout(kind: str) -> dict[str, bytes]:
    flat = {f"val/{name}": content for name, content in validation_images().items()}
    unpacked = {
        f"train/{name}/{file}": content
        for label, name in enumerate(CLASSES)
        for file, content in train_images(label).items()
    }
    return {
        "archives": archives(),
        "archives of classes": {f"train/{name}.tar": tar(train_images(n)) for n, name in enumerate(CLASSES)}
        | flat
        | devkit(),
        "flat, beside the archive of the devkit": unpacked | flat | {"ILSVRC2012_devkit_t12.tar.gz": KIT},
        "flat, beside the devkit": unpacked | flat | devkit(),
    }[kind]


KINDS = [
    "archives",
    "archives of classes",
    "flat, beside the archive of the devkit",
    "flat, beside the devkit",
]


@pytest.mark.parametrize("kind", KINDS)
def test_imagenet_is_read_as_it_is_distributed(tmp_path: Path, kind: str) -> None:
    found = image_sources.local_folder(write(tmp_path, layout(kind)))
    assert found.classes == 3
    train, validation = found.splits["train"], found.splits["validation"]
    assert train["label"] == [0, 0, 1, 1, 2, 2]
    assert validation["label"] == VALIDATION
    seen = [decoded(row["image"]).getpixel((5, 5)) for row in train]
    assert seen == [(grey(label, number),) * 3 for label in range(3) for number in range(2)]
    seen = [decoded(row["image"]).getpixel((5, 5)) for row in validation]
    assert seen == [(grey(label, number),) * 3 for number, label in enumerate(VALIDATION, 1)]


@pytest.mark.parametrize("packed", [True, False])
def test_validation_images_may_stand_alone(tmp_path: Path, packed: bool) -> None:
    images = {"ILSVRC2012_img_val.tar": tar(validation_images())} if packed else validation_images()
    found = image_sources.local_folder(write(tmp_path, images | devkit()))
    assert (len(found.splits["train"]), len(found.splits["validation"])) == (4, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ILSVRC2012_devkit_t12.tar.gz": None}, "images without classes, and no ILSVRC2012_devkit_t12.tar.gz that"),
        ({"ILSVRC2012_devkit_t12.tar.gz": KIT[:-30]}, "ends too early"),
        ({"ILSVRC2012_devkit_t12.tar.gz": b"<html>"}, "devkit_t12.tar.gz ends too early or is broken"),
        ({"ILSVRC2012_devkit_t12.tar.gz": None, TRUTH: devkit()[TRUTH]}, "t12 has no classes of ImageNet: 'meta.mat'"),
        ({"ILSVRC2012_devkit_t12.tar.gz": None, TRUTH: b"12\n12\n12\n7\n", META: devkit()[META]}, "no classes .*: 7"),
        ({TRUTH: b"12\xe9\n", META: devkit()[META]}, "t12 is not in UTF-8"),
        ({TRUTH: b"12\n12\n12\n", META: devkit()[META]}, r"no class of .*img_val\.tar"),
        ({TRUTH: devkit()[TRUTH], META: b"no matrix" * 99}, r"has no classes of ImageNet"),
        ({"ILSVRC2012_img_val.tar": None}, r"no subfolder validation .* and no ILSVRC2012_img_val\.tar"),
        ({"ILSVRC2012_img_val.tar": tar(validation_images(), "w:gz")}, r"img_val\.tar ends too early or is broken"),
    ],
)
def test_what_is_missing_or_broken_is_told_in_a_sentence(
    tmp_path: Path, changes: dict[str, bytes | None], words: str
) -> None:
    given = {name: content for name, content in {**archives(), **changes}.items() if content is not None}
    with pytest.raises(RecipeError, match=words) as caught:
        image_sources.local_folder(write(tmp_path, given))
    assert caught.value.hint is not None


def test_an_archive_that_ends_anywhere_too_early_is_told(tmp_path: Path) -> None:
    whole = train_archive()
    file = tmp_path / "ILSVRC2012_img_train.tar"
    file.write_bytes(whole)
    assert len(list(imagenet.members(file))) == 6
    with tarfile.open(file) as archive:  # its end, behind which zeros fill a block of 10 KiB
        end = max(member.offset_data + member.size for member in archive)
    for length in range(0, end, 512):
        file.write_bytes(whole[:length])
        with pytest.raises(RecipeError, match=r"img_train\.tar ends too early or is broken"):
            list(imagenet.members(file))
