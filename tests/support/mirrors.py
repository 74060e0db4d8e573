"""Which test file has the tests of a module.

The tests of ``lightning_pipe/room/module.py`` are in ``tests/room/test_module.py``. `ELSEWHERE` names the file for
modules that are parts of something which is tested as a whole: a schedule family is compared with all others, and the
Trainer's parts with one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.structure import PACKAGE, ROOT

_ROOMS: dict[str, dict[str, str]] = {
    ".": {
        "__main__": "test_package",
        "callbacks": "docs/test_blocks",
        "lightning_internals": "test_internals",
        "local_parts": "sharding/test_checkpoints",
        "text": "planning/test_render",
        "torch_internals": "test_internals",
        "version": "test_package",
    },
    "batches": {
        "batch_splitter": "batches/test_token_losses",
        "micro_batches": "batches/test_split_batch",
        "outputs": "batches/test_joining",
    },
    "construction": {
        "context": "construction/test_deferred",
        "drawing": "construction/test_families",
        "module": "construction/test_deferred",
        "operators": "construction/test_families",
        "tape": "construction/test_deferred",
        "unset": "construction/test_dropped_references",
    },
    "engine": {
        "pipeline": "engine/test_schedules",
        "refusals": "trainer/test_checks",
        "turns": "intercept/turns/test_run",
        "whole_gradients": "trainer/whole_model/test_gradient_norms",
    },
    "engine/first_batch": {"trial_runs": "engine/first_batch/test_trial_losses"},
    "intercept": {"in_place": "intercept/test_changes_in_place", "incoming": "intercept/test_what_crosses"},
    "intercept/torch_patches": {"activation_checkpoints": "intercept/test_surroundings"},
    "intercept/turns": {"tracker": "intercept/turns/test_run"},
    "parameters": {"releasing": "parameters/test_ownership"},
    "partition": {"holding": "planning/test_memory"},
    "planning": {
        "command": "test_cli",
        "prediction": "planning/test_search",
        "schedule_command": "test_cli",
        "search_result": "planning/test_search",
    },
    "plain": {"sharing": "plain/test_pipeline"},
    "profiling": dict.fromkeys(("command", "layers", "machine", "make", "processes"), "profiling/test_measure"),
    "schedules": {
        "action": "schedules/test_ir",
        "dependencies": "schedules/families/test_families",
        "family": "schedules/test_registry",
    },
    "schedules/asynchronous": dict.fromkeys(("calls", "pipedream"), "schedules/asynchronous/test_stream"),
    "schedules/families": dict.fromkeys(
        (
            "bitpipe",
            "building_block",
            "chimera",
            "dual_pipe",
            "gpipe",
            "interleaved",
            "naive",
            "one_f_one_b",
            "zero_bubble",
        ),
        "schedules/families/test_families",
    ),
    "sharding": {
        "mesh": "sharding/test_tensor_parallel",
        "roots": "sharding/test_refusals",
        "styles": "sharding/test_tensor_parallel",
        "undone": "sharding/test_fully_sharded",
        "values": "sharding/test_without_memory",
    },
    "simulate": {
        "link": "simulate/test_costs",
        "plot": "simulate/test_drawing",
        "style": "simulate/test_drawing",
        "terminal": "simulate/test_drawing",
    },
    "trainer": {
        "divided_module": "trainer/test_equality",
        "model_sharding": "sharding/test_refusals",
        "report": "trainer/test_fit",
        "run": "trainer/test_equality",
        "strategy": "trainer/test_equality",
    },
    "trainer/checkpoints": {"entries": "trainer/checkpoints/test_divided"},
    "trainer/data": {"loaders": "trainer/data/test_replica_data"},
    "trainer/evaluation": dict.fromkeys(("evaluations", "fetched"), "trainer/evaluation/test_stream"),
    "trainer/whole_model": {
        "absent_gradients": "trainer/whole_model/test_walks",
        "metrics": "trainer/whole_model/test_logging",
        "precision": "trainer/whole_model/test_gradient_norms",
    },
    "transport": {
        "arrangement": "trainer/test_world",
        "base": "transport/test_transports",
        "gloo": "transport/test_transports",
        "nonblocking_broadcast": "trainer/evaluation/test_stream",
        "single_process": "plain/test_pipeline",
        "work": "transport/test_transports",
    },
    "transport/shared_memory": {"rendezvous": "transport/shared_memory/test_peer"},
}

ELSEWHERE = {
    str(Path(room) / f"{module}.py"): f"{tests}.py"
    for room, modules in _ROOMS.items()
    for module, tests in modules.items()
}
"""By module the file with its tests, where that is not its mirror; paths below the package and below ``tests``."""


def modules_with_tests() -> Iterator[tuple[str, str | None]]:
    """Every module of the package with the file that has its tests; ``None`` where there is none."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = path.relative_to(ROOT / PACKAGE)
        if module.name == "__init__.py":
            continue
        mirror = module.with_name(f"test_{module.name}")
        found = str(mirror) if (ROOT / "tests" / mirror).exists() else ELSEWHERE.get(str(module))
        yield str(module), found
