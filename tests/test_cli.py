"""The command lightning-pipe: what it prints and writes, and one line for each mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipe import schedules
from lightning_pipe.cli import main
from lightning_pipe.schedules import Interleaved, read_csv
from tests.support.pairs import slow_but


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["schedule", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_is_drawn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, name)
    assert out.startswith(f"{name}: 4 ranks, 8 micro-batches, bubble ratio ")
    assert len([line for line in out.splitlines() if line.startswith("stage")]) % 4 == 0


@pytest.mark.parametrize(
    ("alias", "family"),
    [("dapple", "1f1b"), ("VHalf", "zero_bubble variant=v_half"), ("vmin", "zero_bubble variant=v_min")],
)
def test_a_schedule_is_drawn_under_the_name_that_was_given(
    alias: str, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = family.split(" variant=")
    own = run(capsys, name, *(word for option in options for word in ("--options.variant", option)))
    assert own.startswith(f"{family}: 4 ranks")
    assert run(capsys, alias) == own.replace(family, f"{alias} ({family})", 1)


def test_sizes_costs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(
        capsys,
        *("interleaved", "--ranks", "2", "--micro-batches", "2", "--options.virtual_stages", "3"),
        *("--forward", "1/3", "--backward", "2/3"),
    )
    assert "5F1" in out
    assert "makespan 7," in out
    assert "makespan 27," in run(
        capsys, "gpipe", "--ranks", "3", "--micro-batches", "4", "--stages", "3", "--forward", "[1,2,3]"
    )


def test_pictures_and_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("x.png", "x.csv")]
    out = run(capsys, "interleaved", "--png", paths[0], "--csv", paths[1])
    assert [line for line in out.splitlines() if "wrote" in line] == [f"wrote {path}" for path in paths]
    assert all(Path(path).stat().st_size > 100 for path in paths)
    assert read_csv(paths[1]).actions == Interleaved().build(4, 8).actions
    assert "x: 4 ranks, 8 micro-batches" in run(capsys, paths[1])


def test_recomputation_is_drawn_and_charged(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "gpipe", "--recompute", "always", "--recompute-time", "1/2", "--micro-batches", "2")
    # the last micro-batch of the last stage goes back at once and keeps its activations
    assert "R0 B0" in out
    assert "R1" not in out.splitlines()[4]
    assert "makespan 15.5," in out


def test_all_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "compare", "--ranks", "2", "--micro-batches", "3")
    for name in schedules.names():
        assert f"\n{name} " in out
    odd = run(capsys, "compare", "--ranks", "3")
    assert "chimera: Chimera needs pipes to divide the ranks, got pipes=2 and ranks=3." in odd


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule", "1f2b"], "There is no schedule '1f2b'; known are"),
        (["schedule", "1f1b", "--ranks", "0"], "needs ranks to be a whole number >= 1"),
        (["schedule", "1f1b", "--ranks", "two"], "--ranks cannot be 'two'"),
        (["schedule", "1f1b", "--forward", "1,x"], "--forward cannot be '1,x'"),
        (["schedule", "1f1b", "--forward", "[1,2]"], "Costs.forward has 2 numbers, but the schedule has 4 stages"),
        (["schedule", "1f1b", "--backward", "-1"], "Costs.backward must be a number, 0 or more, got -1"),
        (["schedule", "gpipe", "--options", "chunks"], "--options cannot be 'chunks'"),
        (["schedule", "gpipe", "--options.chunks", "2"], "has no option 'chunks'"),
        (["schedule", "gpipe", "--stages", "3"], "needs at least 4 stages"),
        (["schedule", "nothing.csv"], "nothing.csv cannot be read: No such file or directory"),
        (["schedule", "gpipe", "--csv", "/nowhere/x.csv"], "/nowhere/x.csv cannot be written: No such file"),
        (["schedule", "gpipe", "--png", "x.gpipe"], "x.gpipe cannot be written: Format 'gpipe' is not supported"),
        (["schedule", "compare", "--ranks", "0"], "needs ranks to be a whole number >= 1, got ranks=0"),
        (["schedule", "looped_bfs", "--options.virtual_stages", "1.5"], "got virtual_stages=1.5. Hint: Use virtual_st"),
        (
            ["schedule", "vmin", "--options.variant", "h2"],
            "'vmin' is 'zero_bubble' with variant='v_min', got variant='h2'",
        ),
        (["schedule", "gpipe", "--overlap", "nan"], "--overlap cannot be 'nan'"),
        (["schedule", "compare", "--csv", "x.csv"], "it takes no --options, --png and --csv"),
        (["schedule", "compare", "--forward", "[1,2]"], "schedules have different numbers of stages"),
        (["schedule"], "required: name"),
        (["schedule", "1f1b", "--links", "all"], "--links cannot be 'all'"),
        (["schedule", "1f1b", "--nothing", "1"], "unrecognized arguments: --nothing"),
        (["plot"], "there is no command 'plot'; known are schedule, plan, search, profile"),
    ],
)
def test_mistakes_get_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-pipe: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_help_has_groups_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in ("schedule", "plan", "search", "profile"))
    for name, group in (
        ("schedule", "Times of one micro-batch"),
        ("plan", "What is planned"),
        ("search", "What is searched"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        told = capsys.readouterr().out
        assert f"\n{group}" in told
        assert f"\nexamples:\n  lightning-pipe {name} " in told
        assert "--micro_batches" in told


def test_notes_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "interleaved", "--micro-batches", "3"])
    assert capsys.readouterr().err.startswith("lightning-pipe: note: Schedule 'interleaved' has no order of its own")


def test_a_reader_may_stop_reading() -> None:
    command = [sys.executable, "-u", "-m", "lightning_pipe", "schedule", "gems"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


SLOW = {"torch", "lightning", "numpy", "matplotlib", "transformers"}
"""Packages whose import takes longer than what a command that needs no module has to do."""


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["schedule", "1f1b"], "1f1b: 4 ranks"),
        (["plan", "--help"], "usage: lightning-pipe plan "),
        *slow_but([([name, "--help"], f"usage: lightning-pipe {name} ") for name in ("search", "profile", "schedule")]),
    ],
)
def test_the_command_starts_without_what_it_does_not_need(words: list[str], begin: str) -> None:
    names = f"print(sorted({SLOW!r} & sys.modules.keys()))"
    run = f"import atexit, sys, lightning_pipe.cli; atexit.register(lambda: {names}); lightning_pipe.cli.main({words})"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(begin)
    assert done.stdout.splitlines()[-1] == "[]"


MODELS = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, layers, width=8):
        super().__init__(*(nn.Linear(width, width) for _ in range(layers)))

def huge():
    return Net(6, width=1_000_000)

def number():
    return 3

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(4), Net(4)

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
"""


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_models", None)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


@pytest.mark.usefixtures("_models")
def test_a_module_of_the_user_s_is_planned_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "my_models:Net", "--arguments.layers", "6", "--ranks", "2", "--balance", "[4,2]")
    assert "0 … 3 (4 layers)" in out
    assert "predicted bubble 11.1 %" in out
    out = planned(capsys, "my_models:Net", "--arguments.layers", "6", "--ranks", "2", "--passes", "2")
    assert "1f1b in 2 passes" in out
    out = planned(
        capsys, "my_models:huge", "--ranks", "3", "--schedule", "interleaved", "--schedule_options.virtual_stages", "2"
    )
    assert "6,000,006,000,000 parameters" in out
    assert "Schedule  interleaved" in out


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("name", "first"), [("Both", "encoder"), ("Rows", "first")])
def test_layers_that_are_not_clear_are_planned_in_the_order_of_registration(
    name: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = planned(capsys, f"my_models:{name}", "--ranks", "2")
    assert f"Pipeline of {name}" in out
    assert next(line for line in out.splitlines() if line.startswith("│ 0 ")).count(first)


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["my_models"], "not of the form package.module:Name"),
        (["my_models:Nat"], "cannot be imported: module 'my_models' has no attribute 'Nat'"),
        (["your_models:Net"], "cannot be imported: No module named 'your_models'"),
        (["my_models:Net"], "missing 1 required positional argument: 'layers' Hint: Give the values it needs"),
        (["my_models:number"], "made a int, not a module"),
        (["my_models:huge", "--ranks", "7"], "does not hold 7 layers with parameters"),
        (["my_models:huge", "--ranks", "0"], "ranks of 1 or more, not ranks=0"),
        (["my_models:huge", "--schedule", "1fb1"], "Did you mean '1f1b'?"),
        (["my_models:huge", "--balance", "4,x"], "--balance cannot be '4,x'"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        planned(capsys, *arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
