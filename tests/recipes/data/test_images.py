"""Images from folders, digits and the hub, as the image recipes get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data import image_sources
from recipes.data.augment import Augmentation, centre
from recipes.data.images import ImageFolder
from recipes.data.loading import Draw
from recipes.errors import RecipeError


def write_images(folder: Path, classes: tuple[str, ...] = ("n01", "n02"), train: int = 6, validation: int = 2) -> Path:
    """Writes images as the ImageNet archives are unpacked."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", validation)):
        for name in classes:
            place = folder / split / name
            place.mkdir(parents=True)
            for index in range(count):
                size = tuple(random.integers(20, 60, size=2))
                pixels = random.integers(256, size=(*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{name}_{index}.JPEG")
    Image.fromarray(np.zeros((30, 30), np.uint8)).save(folder / "train" / classes[0] / "grey.png")
    return folder


def data_module(**settings: Any) -> ImageFolder:
    made = ImageFolder(**{"image_size": 16, "batch_size": 4, "classes": 2} | settings)
    made.prepare_data()
    made.setup("fit")
    return made


def test_a_local_folder(tmp_path: Path) -> None:
    data = data_module(files=str(write_images(tmp_path / "images")))
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (4, 3, 16, 16)
    assert batch["label"].dtype == torch.int64
    assert len(data.split("train")) == 13
    assert [sample["label"] for sample in data.split("validation")] == [0, 0, 1, 1]  # type: ignore[attr-defined]


def test_the_digits_are_real_and_divided_once_and_for_all() -> None:
    images = image_sources.digits()
    assert "8 x 8" in images.title
    assert "digits" in images.title
    assert [len(images.splits[split]) for split in ("train", "validation")] == [1437, 360]
    assert images.classes == 10
    assert set(images.splits["validation"]["label"]) == set(range(10))


def test_some_classes_are_taken_and_numbered_anew() -> None:
    every, some = image_sources.digits(), image_sources.digits().of([7, 2])
    assert some.classes == 2
    assert "2 of 10 classes" in some.title
    for split, rows in some.splits.items():
        labels = every.splits[split]["label"]
        assert [[7, 2][label] for label in rows["label"]] == [label for label in labels if label in (7, 2)]
    with pytest.raises(RecipeError, match=r"data\.labels has 10"):
        every.of([10])
    assert data_module(source="digits", labels=[3, 4], classes=2).train_dataloader() is not None


def test_training_images_differ_between_epochs_and_not_between_runs(tmp_path: Path) -> None:
    files = str(write_images(tmp_path / "images"))
    one, other = (data_module(files=files).split("train") for _ in range(2))
    assert torch.equal(one[Draw(1, 3)]["image"], other[Draw(1, 3)]["image"])
    assert not torch.equal(one[Draw(1, 3)]["image"], one[Draw(2, 3)]["image"])


def test_a_noisy_copy_is_the_image_and_noise_of_the_asked_size(tmp_path: Path) -> None:
    data = data_module(files=str(write_images(tmp_path / "images")), image_size=64, noise=0.5)
    train, validation = data.split("train"), data.split("validation")
    noise = train[Draw(1, 3)]["noisy"] - train[Draw(1, 3)]["image"]
    assert noise.std() == pytest.approx(0.5, rel=0.05)
    assert abs(noise.mean()) < 0.03
    assert not torch.equal(noise, train[Draw(2, 3)]["noisy"] - train[Draw(2, 3)]["image"])
    assert torch.equal(validation[0]["noisy"], validation[0]["noisy"])
    assert "noisy" not in data_module(files=str(tmp_path / "images")).split("train")[0]


def test_augmentation_cuts_out_enlarges_and_blanks() -> None:
    left, right = np.zeros((40, 20, 3), np.uint8), np.full((40, 20, 3), 255, np.uint8)
    image = Image.fromarray(np.concatenate([left, right], axis=1))
    whole = Augmentation(8, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)(image, np.random.default_rng(0))
    assert whole.shape == (3, 8, 8)
    assert whole[:, :, 0].eq(-1).all()
    assert whole[:, :, -1].eq(1).all()
    blanked = [
        Augmentation(8, area=(1.0, 1.0), ratio=(1.0, 1.0), flip=False, cutout=4)(image, np.random.default_rng(seed))
        for seed in range(30)
    ]
    counts = {int((one != whole)[0].sum()) for one in blanked}
    assert max(counts) >= 12
    assert max(counts) <= 16
    flipped = {
        bool(Augmentation(8, area=(1.0, 1.0), ratio=(1.0, 1.0))(image, np.random.default_rng(seed))[0, 0, 0] > 0)
        for seed in range(8)
    }
    assert flipped == {True, False}


def test_validation_sees_the_middle() -> None:
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, 20:60] = 255
    assert centre(Image.fromarray(pixels), 8).min() > 0.9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "files"}, "needs a folder"),
        ({"files": "{tmp}/nowhere"}, "no folder"),
        ({"files": "{tmp}/one"}, "no subfolder validation or val"),
        ({"files": "{tmp}/empty"}, "val has no images"),
        ({"files": "{tmp}/other"}, "has the class n09"),
        ({"files": "{tmp}/good", "classes": 1}, "2 classes of images, the model is built for 1"),
        ({"files": "{tmp}/good", "classes": 10}, "2 classes of images, the model is built for 10"),
    ],
)
def test_bad_folders_are_told_in_a_sentence(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_images(tmp_path / "good")
    (tmp_path / "one" / "train").mkdir(parents=True)
    write_images(tmp_path / "empty", validation=0)
    write_images(tmp_path / "other")
    (tmp_path / "other" / "val" / "n01").rename(tmp_path / "other" / "val" / "n09")
    settings = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(RecipeError, match=words):
        data_module(**settings)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    victim = next((folder / "val" / "n01").iterdir())
    victim.write_bytes(victim.read_bytes()[:300])
    with pytest.raises(RecipeError, match=f"The image .*{victim.name} cannot be read"):
        list(data_module(files=str(folder)).val_dataloader())


def test_the_hub_s_columns_are_what_imagenet_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path / "images")
    images = image_sources.local_folder(folder)
    for split, rows in images.splits.items():
        from datasets import Image as Column

        rows.cast_column("image", Column()).to_parquet(tmp_path / f"{split}.parquet")

    def load(name: str) -> Any:
        from datasets import load_dataset

        files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "validation")}
        return load_dataset("parquet", data_files=files)

    monkeypatch.setattr(image_sources, "load_dataset", load)
    data = data_module(source="hub")
    assert data.images is not None
    assert data.images.title == "ILSVRC/imagenet-1k from the hub"
    assert next(iter(data.val_dataloader()))["image"].shape == (4, 3, 16, 16)
