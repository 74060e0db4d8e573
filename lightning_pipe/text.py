"""Numbers and names as people read them, for plans and error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from lightning_pipe.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import RenderableType


def amount(number: float) -> str:
    """Writes a count with three digits and a unit.

    Example:
        >>> amount(124_439_808), amount(8_200), amount(17)
        ('124 M', '8.2 k', '17')
    """
    return _scaled(number, ("", "k", "M", "G", "T"), 1000)


def memory(number_of_bytes: float) -> str:
    """Writes a number of bytes in binary units.

    Example:
        >>> memory(1_991_036_928), memory(512)
        ('1.85 GiB', '512 B')
    """
    return _scaled(number_of_bytes, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def number_of_bytes(text: str) -> float:
    """Reads a size.

    Raises:
        ConfigurationError: it is none.

    Example:
        >>> number_of_bytes("1.5KiB"), number_of_bytes("500MB"), number_of_bytes("1e9")
        (1536.0, 500000000.0, 1000000000.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([KMGT])(i?)B?)?", text, re.IGNORECASE)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a size such as 16GiB, 500MB or 1e9.")
    number, letter, binary = match.groups()
    power = "KMGT".index(letter.upper()) + 1 if letter else 0
    return float(number) * float((1024 if binary else 1000) ** power)


def several(number: int, noun: str) -> str:
    """Writes a number with its noun in singular or plural.

    Example:
        >>> several(1, "layer"), several(3, "micro-batch")
        ('1 layer', '3 micro-batches')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like the given one, or None where nothing is alike.

    Example:
        >>> nearest("encodr.block", ["encoder.block", "decoder.block"])
        'encoder.block'
    """
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 0) -> str:
    """Writes cells in columns: figures end below each other, names begin below each other.

    Args:
        headings: of the columns.
        rows: cells.
        names: the column of names.

    Example:
        >>> print(table(["fruit", "kg"], [["apples", "1.5"], ["figs", "12"]]))
        fruit    kg
        apples  1.5
        figs     12
    """
    # not for every command that needs a number written
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), pad_edge=False)
    for column in range(len(headings)):
        grid.add_column(justify="left" if column == names else "right", no_wrap=True)
    for row in (headings, *rows):
        grid.add_row(*map(Text, row))  # as Text, brackets in names are not read as markup
    return printed(grid)


def printed(renderable: RenderableType, width: int = 10_000) -> str:
    """What a rich console prints, as plain text.

    Args:
        renderable: a table, or several things in a group.
        width: columns of the text.
    """
    from rich.console import Console

    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _scaled(number: float, units: tuple[str, ...], base: int) -> str:
    # 999.5 would be rounded to 1000: it belongs to the next unit
    for unit in units[:-1]:
        if abs(number) < 999.5:
            return f"{number:.3g} {unit}".rstrip()
        number /= base
    return f"{number:.3g} {units[-1]}" if abs(number) < 999.5 else f"{number:.0f} {units[-1]}"
