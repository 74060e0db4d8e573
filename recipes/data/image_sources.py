"""Where images come from: ImageNet on the hub, a local folder of images, or scikit-learn's handwritten digits."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, load_dataset

from recipes.data.files import chosen
from recipes.errors import RecipeError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VALIDATION_EVERY = 5
WITHIN = "::"  # between the path of a shard and the place of an image in it


@dataclass(frozen=True)
class Images:
    """Labelled images in two splits.

    Args:
        title: what the images are, for the log: they must never pass for something else.
        splits: "train" and "validation", each with the columns "image" (not decoded) and "label".
        classes: their number.
    """

    title: str
    splits: Mapping[str, Dataset]
    classes: int


def digits() -> Images:
    """Reads scikit-learn's handwritten digits: real images that need no network. Every fifth is for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RecipeError(
            "The local stand-in for ImageNet, scikit-learn's handwritten digits, needs scikit-learn.",
            hint="Install it (pip install scikit-learn), or name a folder of images with data.files=FOLDER.",
        ) from None
    from PIL import Image as Picture

    bunch = load_digits()
    pictures = [Picture.fromarray((image / 16 * 255).astype("uint8")) for image in bunch.images]
    rows: dict[str, dict[str, list[Any]]] = {split: {"image": [], "label": []} for split in ("train", "validation")}
    for index, (picture, label) in enumerate(zip(pictures, bunch.target.tolist(), strict=True)):
        split = rows["validation" if index % VALIDATION_EVERY == 0 else "train"]
        split["image"].append(picture)
        split["label"].append(label)
    features = Features({"image": Image(), "label": _class_label([str(digit) for digit in range(10)])})
    splits = {split: Dataset.from_dict(columns, features=features) for split, columns in rows.items()}
    title = f"scikit-learn's {len(pictures):,} handwritten digits of 8 x 8 pixels, enlarged"
    return Images(title, _undecoded(splits), classes=10)


def local_folder(folder: Path) -> Images:
    """Reads images in one subfolder per class, or in shards as webdataset writes them (``NAME.jpg`` with ``NAME.cls``).

    Args:
        folder: has ``train`` and ``validation`` (or ``val``, ``valid``), as the ImageNet archives are usually unpacked;
            or classes or shards alone: then every fifth image is for validation.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}.", hint="data.files names the folder that holds the images.")
    if (folder / "train").is_dir():
        places = {"train": folder / "train", "validation": _first(folder, ("validation", "val", "valid"))}
        found = {split: _images(place) for split, place in places.items()}
    else:
        every = _images(folder)
        held = {"train": False, "validation": True}
        found = {
            split: [one for index, one in enumerate(every) if (index % VALIDATION_EVERY == 0) == of_validation]
            for split, of_validation in held.items()
        }
        places = dict.fromkeys(found, folder)
    for split, images in found.items():
        if not images:
            raise RecipeError(
                f"{places[split]} has no images.",
                hint=f"Put them into one subfolder for every class, as {', '.join(SUFFIXES)}, or into shards (*.tar).",
            )
    names = sorted({name for _, name in found["train"]}, key=_order)
    if unknown := sorted({name for _, name in found["validation"]} - set(names)):
        raise RecipeError(
            f"{places['validation']} has the class {unknown[0]}, which {places['train']} has not.",
            hint="Both splits need the same classes.",
        )
    features = Features({"image": Image(), "label": _class_label(names)})
    numbers = {name: number for number, name in enumerate(names)}
    splits = {
        split: Dataset.from_dict(
            {"image": [path for path, _ in images], "label": [numbers[name] for _, name in images]}, features=features
        )
        for split, images in found.items()
    }
    return Images(f"the images in {folder}", _undecoded(splits), len(names))


def _order(name: str) -> tuple[int, str]:
    """Numbers by their size, other names by the alphabet."""
    return (len(name), name) if name.isdigit() else (0, name)


def _images(place: Path) -> list[tuple[str, str]]:
    """For each image where it is, and the name of its class."""
    shards = sorted(place.glob("*.tar"))
    if shards:
        return [pair for shard in shards for pair in tar_images(shard)]
    files = (path for path in sorted(place.glob("*/*")) if path.suffix.lower() in SUFFIXES)
    return [(str(path), path.parent.name) for path in files]


def tar_images(shard: Path) -> Iterator[tuple[str, str]]:
    """The images of a shard, which stay in it: each by the shard's path and the place of its bytes.

    Args:
        shard: has for every image a file with the same name that ends in ``.cls``, with the class.
    """
    with tarfile.open(shard, "r:") as archive:  # not compressed: images are read at their places
        members = {member.name: member for member in archive if member.isfile()}
        for name, member in members.items():
            stem, dot, suffix = name.rpartition(".")
            if f"{dot}{suffix}".lower() not in SUFFIXES:
                continue
            if f"{stem}.cls" not in members:
                raise RecipeError(f"{shard} has {name}, and no {stem}.cls.", hint="Every image needs its class there.")
            told = archive.extractfile(members[f"{stem}.cls"])
            assert told is not None
            yield f"{shard}{WITHIN}{member.offset_data}+{member.size}", told.read().decode().strip()


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    raise RecipeError(
        f"{folder} has no subfolder {' or '.join(names)}.",
        hint="It needs train and validation, each with one subfolder for every class.",
    )


def hub(name: str) -> Images:
    """Downloads images from the Hugging Face hub, or takes them from the hub's cache on this machine."""
    loaded = load_dataset(name)
    splits = {split: loaded[split] for split in ("train", "validation")}
    for split, rows in splits.items():
        if missing := {"image", "label"} - set(rows.column_names):
            raise RecipeError(
                f"The {split} split of {name} has the columns {rows.column_names}; {missing.pop()!r} is needed.",
                hint="Choose another data.name.",
            )
        if not len(rows):
            raise RecipeError(f"The {split} split of {name} is empty.", hint="Choose another data.name.")
    return Images(f"{name} from the hub", _undecoded(splits), splits["train"].features["label"].num_classes)


def _undecoded(splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
    # decoded one by one when they are needed, where the name of one that cannot be read is known
    return {split: rows.cast_column("image", Image(decode=False)) for split, rows in splits.items()}


def _class_label(names: list[str]) -> Any:
    from datasets import ClassLabel

    return ClassLabel(names=names)


def read(source: str, files: str | None, name: str) -> Images:
    """Reads the images from a source.

    Args:
        source: "hub", "files" or "digits".
        files: folder with local images.
        name: data set on the hub.
    """
    if source == "files":
        return local_folder(chosen(files, name))
    if source == "hub":
        return hub(name)
    if source == "digits":
        return digits()
    raise RecipeError(f"data.source={source} is unknown.", hint="Choose auto, hub, files or digits.")
