"""Profiles: read, written, interpolated, and refused where they are of something else."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.cost_profile import FORMAT, CostProfile, LayerSizes, SizeCosts, TiedSizes, merged
from lightning_pipe.simulate import Link


def profile(**changes: object) -> CostProfile:
    layers = tuple(LayerSizes(f"h.{number}", 100, 400) for number in range(3))
    sizes = {
        2: SizeCosts((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (1.0, 2.0, 3.0), (10.0,) * 3, (4.0,) * 3, 0.5, 0.25),
        4: SizeCosts((1.5, 3.0, 4.5), (3.0, 6.0, 9.0), (1.5, 3.0, 4.5), (20.0,) * 3, (8.0,) * 3, 0.5, 0.25),
    }
    options = {"message": Link(0.1, 0.01), "overhead": 0.01, "conditions": {"threads": "1", "torch": "2.9"}, **changes}
    return CostProfile("Net", layers, sizes, **options)  # type: ignore[arg-type]


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "net.json"
    profile().save(path)
    assert CostProfile.load(path) == profile()
    assert json.loads(path.read_text())["format"] == FORMAT


def test_what_is_optional_is_kept_in_a_file(tmp_path: Path) -> None:
    sizes = {size: replace(costs, backward_input=(0.5, 1.0, 2.0)) for size, costs in profile().sizes.items()}
    whole = replace(profile(), sizes=sizes, tied=(TiedSizes((0, 2), 400),))
    whole.save(tmp_path / "net.json")
    assert CostProfile.load(tmp_path / "net.json") == whole
    assert whole.at(3).backward_input == (0.5, 1.0, 2.0)
    assert replace(whole, sizes={2: whole.sizes[2]}).at(4).backward_input == (1.0, 2.0, 4.0)


def test_sizes_between_and_beyond_the_measured_ones() -> None:
    assert profile().at(3).forward == (1.25, 2.5, 3.75)
    assert profile().at(3).saved_bytes == (15.0, 15.0, 15.0)
    assert profile().at(6).forward == (2.0, 4.0, 6.0)
    assert profile().at(6).stage_forward == 0.5
    assert profile().at(1).forward == (0.75, 1.5, 2.25)
    one = CostProfile("Net", profile().layers, {2: profile().sizes[2]})
    assert one.at(4).forward == (2.0, 4.0, 6.0)


def test_other_conditions_are_refused_with_what_differs() -> None:
    profile().check({"threads": "1", "torch": "2.9", "ranks": "8"})
    with pytest.raises(ConfigurationError, match=r"threads 1 in the profile, 4 now; torch 2\.9 in the"):
        profile().check({"threads": "4", "torch": "2.10"})


@pytest.mark.parametrize(
    ("names", "parameters", "message"),
    [
        (["h.0", "h.1"], [100, 100], "3 layers in the profile, 2 in the module"),
        (["h.0", "x", "h.2"], [100] * 3, "layer h.1 with 100 parameters in the profile, x with 100 in the module"),
        (
            ["h.0", "h.1", "h.2"],
            [100, 100, 7],
            "layer h.2 with 100 parameters in the profile, h.2 with 7",
        ),
    ],
)
def test_another_module_is_refused(names: list[str], parameters: list[int], message: str) -> None:
    profile().check_layers(["h.0", "h.1", "h.2"], [100] * 3)
    with pytest.raises(ConfigurationError, match=message):
        profile().check_layers(names, parameters)


def test_figures_of_another_version_are_refused_wherever_they_are_read(tmp_path: Path) -> None:
    replace(profile(), conditions={"lightning_pipe": "0.0.1", "torch": "1.6"}).save(tmp_path / "net.json")
    with pytest.raises(ConfigurationError, match=r"lightning_pipe 0\.0\.1 in the profile, "):
        CostProfile.load(tmp_path / "net.json")


def changed(**changes: object) -> str:
    """A file with other content."""
    content = {"format": FORMAT, **asdict(profile()), **changes}
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is no profile that can be read"),
        ("[]", "is no profile that can be read"),
        ('{"format": "lightning-pipe profile 0"}', "has the format 'lightning-pipe profile 0'"),
        (json.dumps({"format": FORMAT, "module": "Net"}), "no profile that can be read: 'layers'"),
        (changed(layers=[{"name": "a", "parameters": 1, "parameter_bytes": 4}]), "forward needs 1 numbers.* got 3"),
        (changed(sizes={"1": [1, 2]}), "no profile that can be read"),
        (changed(sizes={"one": asdict(profile().sizes[2])}), "no profile that can be read.*'one'"),
        (changed(speed=1), "no profile that can be read.*'speed'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        CostProfile.load(path)


def test_the_median_of_processes_counts() -> None:
    other = CostProfile("Net", profile().layers, {2: profile().sizes[4], 4: profile().sizes[2]}, overhead=0.03)
    both = merged([profile(), other])
    assert both.sizes[2].forward == (1.25, 2.5, 3.75)
    assert both.overhead == 0.02
    assert both.message == profile().message
