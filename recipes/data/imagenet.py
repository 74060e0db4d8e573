"""ImageNet as it is distributed: archives, also of archives, and validation images whose classes stand elsewhere."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from recipes.data import files
from recipes.errors import RecipeError

SYNSET = re.compile(r"n\d{8}")  # the classes' names
ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH, MEANINGS = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
WITHIN = "::"  # between the path of an archive and the place of a file in it
END = bytes(tarfile.BLOCKSIZE)  # what a complete archive has behind its last file


class Member(NamedTuple):
    """A file in an archive: the innermost archive's name without its suffix, its own, and where `content` finds it."""

    archive: str
    name: str
    place: str


def members(archive: Path) -> Iterator[Member]:
    """The files of an archive, and of the archives in it; nothing is unpacked.

    Args:
        archive: not compressed: its files are read at their places.
    """
    with files.reading(archive), archive.open("rb") as file:
        yield from _members(file, archive, archive.stem, 0)


def _members(file: IO[bytes], path: Path, name: str, start: int) -> Iterator[Member]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for one in archive:
            if one.isfile() and one.name.endswith(".tar"):
                inner = archive.extractfile(one)
                assert inner is not None
                yield from _members(inner, path, Path(one.name).stem, start + one.offset_data)
            elif one.isfile():
                yield Member(name, one.name, f"{path}{WITHIN}{start + one.offset_data}+{one.size}")
        file.seek(archive.offset)
        if file.read(len(END)) != END:  # tarfile takes any end of the file for the end of the archive (Python 3.13)
            raise EOFError(f"the end of {name}.tar is missing")


def content(place: str) -> bytes:
    """The bytes of a file in an archive."""
    archive, _, numbers = place.rpartition(WITHIN)
    offset, size = map(int, numbers.split("+"))
    with open(archive, "rb") as file:
        file.seek(offset)
        return file.read(size)


def validation_classes(folder: Path) -> dict[str, str]:
    """The class of every validation image, by the image's name without its suffix.

    Args:
        folder: has the devkit, as an archive or unpacked: a number for every image, and what the numbers mean.

    Raises:
        RecipeError: there is none, or it is broken.
    """
    from scipy.io import loadmat

    kit = next((place for place in (folder / DEVKIT, folder / f"{DEVKIT}.tar.gz") if place.exists()), None)
    if kit is None:
        raise RecipeError(
            f"{folder} has images without classes, and no {DEVKIT}.tar.gz that has those of ImageNet.",
            hint="Put it there; other images belong into one subfolder for every class.",
        )
    try:
        with files.reading(kit):
            found = _devkit(kit)
            table = loadmat(io.BytesIO(found[MEANINGS]), squeeze_me=True)["synsets"]
            names = dict(zip(map(int, table["ILSVRC2012_ID"]), map(str, table["WNID"]), strict=True))
            numbers = map(int, found[TRUTH].decode().split())
            return {f"ILSVRC2012_val_{image:08}": names[number] for image, number in enumerate(numbers, 1)}
    except (ValueError, KeyError, IndexError) as error:
        raise RecipeError(f"{kit} has no classes of ImageNet: {error}.", hint="Download it again.") from error


def _devkit(kit: Path) -> dict[str, bytes]:
    """The two files of the devkit that matter, as far as they are there."""
    if kit.is_dir():
        return {file.name: file.read_bytes() for file in (kit / "data").iterdir() if file.name in (TRUTH, MEANINGS)}
    with tarfile.open(kit) as archive:
        read = {Path(one.name).name: archive.extractfile(one) for one in archive if one.isfile()}
        return {name: file.read() for name, file in read.items() if file is not None and name in (TRUTH, MEANINGS)}
