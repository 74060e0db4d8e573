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
    "CounterBefore": (OLD, "train_chimera"),
    "CounterReadBefore": (OLD, "train_chimera"),
    "CounterBetween": (OLD, "train_chimera"),
    "CounterBehindWeighs": (PIPES, "train_chimera"),
    "CounterBeforeReadBehind": (PIPES, "train_chimera"),
    "PathByACounter": (PIPES, "train_chimera"),
    "PicksATensor": (CHOICE, "train_chimera"),
    "PicksAParameter": (CHOICE, "train_chimera"),
    "MasksTheBatch": (CHOICE, "train_chimera"),
    "TauInTheStep": (OLD, "train_chimera"),
    "TauBehind": (PIPES, "train_chimera"),
    "LastLossBefore": (OLD, "train_chimera"),
    "LastOutputBefore": (PIPES, "train_chimera"),
    "QueueBehind": (PIPES, "train_chimera"),
    "QueueOfTheBatch": (OLD, "train_chimera"),
    "Centred": (PIPES, "train_chimera"),
    "RunningMeanBehind": (PIPES, "train_chimera"),
    "RunningMeanBefore": (OLD, "train_chimera"),
    "BufferInPlaceBefore": (OLD, "train_chimera"),
    "HistoryOfTensors": (OLD, "train_chimera"),
    "LargeTensor": (OLD, "train_chimera"),
    "LargeTensorLate": (LATE, "train_chimera"),
    "LayersCount": (PIPES, "train_chimera"),
    "LayersKeep": (PIPES, "train_chimera"),
    "StateOfLayersReset": (PIPES, "train_chimera"),
    "LayersCountInBuffers": (PIPES, "train_chimera"),
    "DropRateByACounter": (PIPES, "train_chimera"),
    "ScalesLayersByACounter": (PIPES, "train_chimera"),
    "ArgumentByACounter": (CHOICE, "train_chimera"),
    "ReadsALayerAhead": (PIPES, "evaluate_chimera"),
    "HookOfALayer": (HOOK, "train_chimera"),
    "HookOfAPart": (HOOK, "train_chimera"),
    "PreHookOfAPart": (HOOK, "train_1f1b train_recompute train_interleaved train_chimera"),
    "OutsideModuleCounts": (PIPES, "train_chimera"),
    "ConfigOfLayersBefore": (OLD, "train_1f1b train_recompute train_interleaved"),
    "GlobalBehind": (ELSEWHERE, "train_chimera"),
    "GlobalInLayers": (ELSEWHERE, EVERYWHERE),
    "DataModuleInTheStep": (ELSEWHERE, "train_chimera"),
    "TeacherInTheStep": (WRITES, "train_chimera evaluate_1f1b evaluate_interleaved evaluate_chimera"),
    "TeacherByItsData": (WRITES, "train_chimera evaluate_1f1b evaluate_interleaved evaluate_chimera"),
    "AverageOfLayersInTheStep": (PIPES, "train_chimera"),
    "DecaysWeightsBehind": (WRITES, "train_chimera evaluate_chimera"),
    "DecaysWeightsByTheirData": (WRITES, "train_chimera evaluate_chimera"),
}
"""By program: why, and in which phases and schedules."""
