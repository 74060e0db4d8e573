"""Where images come from: ImageNet on the hub, a local folder of images, or scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, load_dataset

from recipes.errors import RecipeError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VALIDATION_EVERY = 5


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
    """Reads a folder with one subfolder per class below ``train`` and below ``validation`` (or ``val``, ``valid``).

    Args:
        folder: as the ImageNet archives are usually unpacked.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}.", hint="data.files names the folder that holds the images.")
    places = {"train": _first(folder, ("train",)), "validation": _first(folder, ("validation", "val", "valid"))}
    names = {split: sorted(path.name for path in place.iterdir() if path.is_dir()) for split, place in places.items()}
    classes = names["train"]
    if unknown := sorted(set(names["validation"]) - set(classes)):
        raise RecipeError(
            f"{places['validation']} has the class {unknown[0]}, which {places['train']} has not.",
            hint="Both splits need the same subfolders, one for every class.",
        )
    features = Features({"image": Image(), "label": _class_label(classes)})
    splits = {}
    for split, place in places.items():
        files = [(path, path.parent.name) for path in sorted(place.glob("*/*")) if path.suffix.lower() in SUFFIXES]
        if not files:
            raise RecipeError(
                f"{place} has no images.",
                hint=f"Put them into one subfolder for every class, as {', '.join(SUFFIXES)}.",
            )
        columns = {"image": [str(path) for path, _ in files], "label": [classes.index(name) for _, name in files]}
        splits[split] = Dataset.from_dict(columns, features=features)
    return Images(f"the images in {folder}", _undecoded(splits), len(classes))


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
        if files is None:
            raise RecipeError("data.source=files needs a folder.", hint="Add data.files=FOLDER.")
        return local_folder(Path(files).expanduser())
    if source == "hub":
        return hub(name)
    if source == "digits":
        return digits()
    raise RecipeError(f"data.source={source} is unknown.", hint="Choose auto, hub, files or digits.")
