"""What the table owes and does not keep today: strict xfails, by name, with the reason."""

from __future__ import annotations

OLD = "stages before the last one compute with the value from before the batch, and there is a warning at most"
PIPES = "each of several pipes has the value of its own micro-batches, and there is a warning at most"
ELSEWHERE = "nobody watches what is neither in the LightningModule nor in its layers"
CHOICE = "what a stage chooses by an old counter makes the same calls, and what they are given is not compared"
HOOK = "a forward hook reads the value from before the batch, and there is a warning at most"
WRITES = "the ranks that do not run the module keep its former parameters"
LATE = "a large tensor that begins to change after the first batches"

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
