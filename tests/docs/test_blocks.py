"""Every command and snippet in README and docs runs, or is named here with the test that runs it."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipe.cli import main
from lightning_pipe.schedules import registry
from tests.docs.blocks import NAMED, PAGES, ROOT, Block, blocks, named
from tests.docs.user_code import MyDataModule, MyLightningModule

LANGUAGES = {"python", "console", "sh", "yaml", "text", "{toctree}", "{eval-rst}"}
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]

COVERED = {
    "python examples/digits.py": "tests/examples/test_examples.py::test_digits",
    "python examples/gpt2.py": "tests/examples/test_examples.py::test_gpt2_is_tuned_and_exported",
    "python examples/cli.py fit": "tests/examples/test_examples.py::test_cli",
    "torchrun --nproc-per-node 2 examples/": "tests/examples/test_loops.py::test_a_loop_trains_as_one_device",
    "python examples/fabric.py": "tests/examples/test_loops.py::test_a_loop_trains_as_one_device",
    "torchrun --nnodes 2": "tests/examples/test_examples.py::test_torchrun_on_two_nodes",
    "torchrun --standalone --nproc-per-node 2": "tests/recipes/test_train.py::test_a_sweep_by_torchrun",
    "python -m tests.support.structure": "tests/test_structure.py::test_the_report_names_every_room",
    "python -m tests.gpu.rehearsal": "tests/gpu/test_rehearsal.py::test_every_part_is_rehearsed",
    "python -m tests.faults": "tests/faults/test_faults.py::test_a_run_with_a_fault_ends_as_it_should",
    "lightning-pipe profile": "tests/profiling/test_measure.py::test_from_the_command_line_to_a_search",
    "lightning-pipe plan": "tests/test_cli.py::test_a_module_of_the_user_s_is_planned_without_weights",
    "lightning-pipe search": "tests/profiling/test_measure.py::test_from_the_command_line_to_a_search",
    "python -m lightning.pytorch.utilities.consolidate_checkpoint": (
        "tests/trainer/checkpoints/test_folder.py::test_the_command_of_lightning_makes_an_ordinary_file"
    ),
    "python -m recipes.train": "tests/recipes/test_docs.py::test_the_commands_compose",
    "python -m recipes.plan": "tests/recipes/test_docs.py::test_the_commands_compose",
    "python -m recipes.reproduce": "tests/recipes/reproduce/test_reproduce.py::test_the_command",
}
"""Commands by their beginning, and the test that runs them or composes their configuration."""

TARGETS_OF_MAKE = re.compile(r"^([a-z-]+):.*##", re.MULTILINE)
BENCHMARKS = "python -m tests.benchmarks"


def one_process(strategy: Any, devices: int = 1, **options: Any) -> L.Trainer:
    """A Trainer whose processes are stages of this one."""
    if isinstance(strategy, str):
        strategy = StrategyRegistry.get(strategy)
    sizes = strategy._asked
    stages = devices * strategy.family.stages_per_rank if sizes[2] == "auto" else sizes[2]
    strategy._asked = ("auto", "auto", stages)
    saves = any(isinstance(each, L.pytorch.callbacks.ModelCheckpoint) for each in options.get("callbacks", ()))
    quiet = {"logger": False, "enable_checkpointing": saves, "enable_progress_bar": False}
    quiet |= {"max_epochs": 1, "enable_model_summary": False}
    return L.Trainer(strategy=strategy, **{**quiet, **options, "accelerator": "cpu", "devices": 1})


class Lightning:
    """`lightning` as the pages import it, but for the Trainer."""

    Trainer = staticmethod(one_process)

    def __getattr__(self, name: str) -> Any:
        return getattr(L, name)


def run_page(page: Path, namespace: dict[str, Any]) -> None:
    for block in blocks(page):
        if block.language == "python":
            # so that a traceback has the page's line
            source = "\n" * (block.line - 1) + block.text.replace("import lightning as L", "")
            exec(compile(source, str(page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after the other, in one process that holds all stages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    run_page(
        page,
        {
            "__name__": "page",
            "L": Lightning(),
            "lightning_pipe": importlib.import_module("lightning_pipe"),
            "MyLightningModule": MyLightningModule,
            "MyDataModule": MyDataModule,
        },
    )


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize("block", named("console"), ids=str)
def test_console_prints_what_it_shows(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands run; where a block shows lines they are compared, up to a line of dots."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    for command, shown in commands(block):
        program, *arguments = shlex.split(command)
        assert program == "lightning-pipe", f"{block}: only lightning-pipe runs in a console block"
        main(arguments)
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed
        wanted = shown[:-1] if shown and shown[-1] == "..." else shown
        assert printed[: len(wanted)] == wanted, str(block)
        assert not shown or shown != wanted or len(printed) == len(shown), str(block)


def lines_of_sh() -> list[tuple[Block, str]]:
    return [
        (block, re.split(r"\s{2,}#|\s+#\s", line)[0].strip())
        for block in named("sh")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def test_commands_of_a_shell_are_covered_by_tests() -> None:
    found = lines_of_sh()
    assert found
    targets = set(TARGETS_OF_MAKE.findall((ROOT / "Makefile").read_text()))
    for block, line in found:
        words = shlex.split(line)
        if words[0] == "make":
            assert words[1] in targets, f"{block}: {line}"
        elif line.startswith(BENCHMARKS):
            for name in words[3:]:
                assert (ROOT / "tests" / "benchmarks" / f"{name}.py").exists(), f"{block}: {line}"
        elif words[:2] == ["pip", "install"]:
            assert words[2] == "."
        else:
            assert any(line.startswith(known) for known in COVERED), f"{block}: nothing covers {line}"
    for test in COVERED.values():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_options_in_yaml_are_those_of_the_strategy() -> None:
    found = [yaml.safe_load(block.text) for block in named("yaml")]
    assert found
    for config in found:
        strategy = config["trainer"]["strategy"]
        module, name = strategy["class_path"].rsplit(".", 1)
        getattr(importlib.import_module(module), name)(**strategy["init_args"])


def test_no_block_is_left_out() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{block}: a block of {block.language or 'nothing'}"


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links are files, and what follows a # is a heading of theirs."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            lines = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}
            assert heading in slugs, f"{page.name}: {target}"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 140
    assert len(text.split()) <= 1250
