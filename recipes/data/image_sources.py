"""Where images come from: ImageNet on the hub, a local folder of images, or scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from datasets import ClassLabel, Dataset, Features, Image, load_dataset

from recipes.data import imagenet
from recipes.errors import RecipeError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VALIDATION = ("validation", "val", "valid")  # names of its folder
VALIDATION_EVERY = 5
T = TypeVar("T")


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

    def of(self, labels: Sequence[int]) -> Images:
        """Those of some classes, which are numbered anew."""
        if wrong := [label for label in labels if not 0 <= label < self.classes]:
            raise RecipeError(
                f"data.labels has {wrong[0]}, and the classes are 0 to {self.classes - 1}.", hint="Leave it out."
            )
        numbers = {label: number for number, label in enumerate(labels)}
        splits = {
            split: rows.filter(lambda label: label in numbers, input_columns="label").map(
                lambda label: {"label": numbers[label]}, input_columns="label"
            )
            for split, rows in self.splits.items()
        }
        return Images(f"{self.title}, {len(labels)} of {self.classes} classes", splits, len(labels))


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
    images, labels = _divided(pictures), _divided(bunch.target.tolist())
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    splits = {
        split: Dataset.from_dict({"image": images[split], "label": labels[split]}, features=features)
        for split in images
    }
    title = f"scikit-learn's {len(pictures):,} handwritten digits of 8 x 8 pixels, enlarged"
    return Images(title, _undecoded(splits), classes=10)


def _divided(values: list[T]) -> dict[str, list[T]]:
    """Every fifth is for validation."""
    train = [value for index, value in enumerate(values) if index % VALIDATION_EVERY]
    return {"train": train, "validation": values[::VALIDATION_EVERY]}


def local_folder(folder: Path) -> Images:
    """Reads images in one subfolder per class, or in ImageNet's archives.

    Args:
        folder: has ``train`` and ``validation`` (or ``val``, ``valid``), or ImageNet's archives in the places of these,
            and beside images without classes what `imagenet.validation_classes` reads. Without ``train``, every fifth
            image is for validation.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}.", hint="data.files names the folder that holds the images.")
    train = _first(folder, ("train",), imagenet.ARCHIVES["train"])
    if train is not None:
        validation = _first(folder, VALIDATION, imagenet.ARCHIVES["validation"])
        if validation is None:
            raise RecipeError(
                f"{folder} has no subfolder {' or '.join(VALIDATION)}, and no {imagenet.ARCHIVES['validation']}.",
                hint="It needs train and validation, each with one subfolder for every class.",
            )
        places = {"train": train, "validation": validation}
        found = {split: _images(place, folder) for split, place in places.items()}
    else:
        found = _divided(_images(folder, folder))
        places = dict.fromkeys(found, folder)
    for split, images in found.items():
        if not images:
            raise RecipeError(
                f"{places[split]} has no images.",
                hint=f"Put them into a folder for every class, as {', '.join(SUFFIXES)}; or take ImageNet's archives.",
            )
    names = sorted({name for _, name in found["train"]}, key=_order)
    if unknown := sorted({name for _, name in found["validation"]} - set(names)):
        raise RecipeError(
            f"{places['validation']} has the class {unknown[0]}, which {places['train']} has not.",
            hint="Both splits need the same classes.",
        )
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
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


def _first(folder: Path, names: tuple[str, ...], archive: str) -> Path | None:
    """The subfolder with one of these names, else the archive."""
    if found := next((folder / name for name in names if (folder / name).is_dir()), None):
        return found
    return folder / archive if (folder / archive).is_file() else None


def _images(place: Path, folder: Path) -> list[tuple[str, str]]:
    """For each image where it is, and the name of its class.

    Args:
        place: folder or archive.
        folder: where the classes stand that `place` does not tell.
    """
    if place.is_file():
        flat = place.name == imagenet.ARCHIVES["validation"]
        return (
            _classed({one.place: one.name for one in imagenet.members(place)}, folder) if flat else list(_packed(place))
        )
    if archives := sorted(place.glob("*.tar")):
        return [pair for archive in archives for pair in _images(archive, folder)]
    if divided := [path for path in sorted(place.glob("*/*")) if _is_image(path.name)]:
        return [(str(path), path.parent.name) for path in divided]
    return _classed({str(path): path.name for path in sorted(place.iterdir()) if _is_image(path.name)}, folder)


def _classed(images: Mapping[str, str], folder: Path) -> list[tuple[str, str]]:
    """Images, of which the names are known by their places, with their classes out of the ground truth."""
    known = imagenet.validation_classes(folder) if images else {}
    for place, name in images.items():
        if Path(name).stem not in known:
            raise RecipeError(f"The ground truth has no class of {place}.", hint="Take the image away.")
    return [(place, known[Path(name).stem]) for place, name in images.items()]


def _packed(archive: Path) -> Iterator[tuple[str, str]]:
    """The images of an archive, which stay in it: each by the archive's path and the place of its bytes.

    Args:
        archive: bears the name of its class, such as ``n01440764.tar``, or has such archives.
    """
    for one in imagenet.members(archive):
        if not imagenet.SYNSET.fullmatch(one.archive):
            raise RecipeError(
                f"{archive} has {one.name} in {one.archive}.tar, which is no class of ImageNet.",
                hint="Unpack other archives: images belong into one subfolder for every class.",
            )
        if _is_image(one.name):
            yield one.place, one.archive


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


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
