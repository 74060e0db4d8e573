"""What the table owes and does not keep today: strict xfails, by name, with the reason."""

from __future__ import annotations

OLD = "what layers refer to is not compared, and stages before the last one have what was there before the batch"
PIPES = "each of several pipes has what layers keep of its own batches"
ELSEWHERE = "nobody watches what is neither in the LightningModule nor in its layers"
HOOK = "pre-hooks on parts of layers run with their layers alone, and read the value from before the batch"
WRITES = "the ranks that do not run the module keep its former parameters"

EVERYWHERE = (
    "train_1f1b train_recompute train_interleaved train_chimera evaluate_1f1b evaluate_interleaved evaluate_chimera"
)

UNEQUAL: dict[str, tuple[str, str]] = {
    "ReadsALayerAhead": (PIPES, "evaluate_chimera"),
    "PreHookOfAPart": (HOOK, "train_1f1b train_recompute train_interleaved"),
    "ConfigOfLayersBefore": (OLD, "train_1f1b train_recompute train_interleaved"),
    "GlobalBehind": (ELSEWHERE, "train_chimera"),
    "GlobalInLayers": (ELSEWHERE, EVERYWHERE),
    "DataModuleInTheStep": (ELSEWHERE, "train_chimera"),
    "TeacherInTheStep": (WRITES, "train_chimera evaluate_1f1b evaluate_interleaved evaluate_chimera"),
    "TeacherByItsData": (WRITES, "train_chimera evaluate_1f1b evaluate_interleaved evaluate_chimera"),
    "DecaysWeightsBehind": (WRITES, "train_chimera evaluate_chimera"),
    "DecaysWeightsByTheirData": (WRITES, "train_chimera evaluate_chimera"),
}
"""By program: why, and in which phases and schedules."""
