"""The arithmetic of a run: ranks and stages out of the world size, micro-batches out of the batch.

This is the one home of the batch equation::

    global batch = batch x data_parallel_size x accumulation
    batch        = sum of the sizes of its micro-batches

where *batch* is what one DataLoader iteration yields to one pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.text import several

Auto = Literal["auto"]
Balance = Literal["auto", "parameters", "flops", "time", "memory"] | Sequence[int] | Callable[[Any], float]
"""What stages are to have the same of, the number of layers of every stage, or the cost of a layer."""

RankOrder = Literal["pipeline", "replicas"]
"""Whose processes have neighbouring numbers: those of a pipeline, or those that hold the same stages."""

Sharding = bool | Literal["gradients", "parameters"]
"""What holders of a parameter divide: nothing; the optimizer's state; this and sums of gradients; all three."""


def divided(sharding: Sharding) -> str:
    """What the holders of a parameter divide, in words.

    Example:
        >>> divided("gradients")
        'sharded optimizer and gradients'
    """
    words = {False: "", True: "sharded optimizer", "gradients": "sharded optimizer and gradients"}
    return {**words, "parameters": "sharded parameters"}[sharding]


THOROUGH, _SAMPLED = 4, 64
"""What is too dear to compare in each batch is compared in the first ones, and in one of so many later ones."""


def is_thorough(batch: int) -> bool:
    """Whether a batch is one of those, counted from 1.

    Example:
        >>> [batch for batch in range(1, 129) if is_thorough(batch)]
        [1, 2, 3, 4, 64, 128]
    """
    return batch <= THOROUGH or batch % _SAMPLED == 0


def check_options(
    micro_batches: object,
    layers: object,
    balance: object,
    loss_weight: object,
    split_batch: object,
    passes: object,
    timeout: object,
    evaluation_micro_batches: object = 1,
    gather_limit: object = 0,
    reduce_dtype: object = None,
) -> None:
    """Refuse what options of `PipeStrategy` and `Pipeline` cannot be; the last ones `PipeStrategy` alone has.

    Raises:
        ConfigurationError: names the option, and what to use.
    """
    _check_count("micro_batches", micro_batches)
    if layers is not None and not (isinstance(layers, Sequence) and all(isinstance(path, str) for path in layers)):
        raise ConfigurationError(
            f"layers={layers!r} names no layers.",
            hint='Use a dotted path of named_modules(), such as "model.layers", several in a list, or None.',
        )
    if not (isinstance(balance, Sequence) or callable(balance)):
        raise ConfigurationError(
            f"balance={balance!r} is not known.",
            hint='Use "auto", "parameters", a list such as [2, 3, 2], or a function of a layer.',
        )
    if not (loss_weight is None or loss_weight == "sum" or callable(loss_weight)):
        raise ConfigurationError(
            f"loss_weight={loss_weight!r} is not known.",
            hint="Use a function of a micro-batch, 'sum', or None: the number of samples.",
        )
    if not (split_batch is None or callable(split_batch)):
        raise ConfigurationError(
            f"split_batch={split_batch!r} is no function.",
            hint="Use one of the batch and the number of micro-batches, which returns these, or None.",
        )
    if not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(
            f"passes={passes!r}: a training step runs its layers a whole number of times, at least 1."
        )
    if not isinstance(timeout, timedelta):
        raise ConfigurationError(
            f"timeout={timeout!r} has no unit.", hint="Write timeout=datetime.timedelta(seconds=…)."
        )
    if not isinstance(evaluation_micro_batches, int) or evaluation_micro_batches < 1:
        raise ConfigurationError(
            f"evaluation_micro_batches={evaluation_micro_batches!r}: a batch has at least one.",
            hint="Use 1, which runs batches whole, or a number of parts that fit.",
        )
    if not isinstance(gather_limit, int) or isinstance(gather_limit, bool) or gather_limit < 0:
        raise ConfigurationError(
            f"gather_limit={gather_limit!r}: a number of bytes is needed, 0 or more.",
            hint="2**30 is one GiB; 0 leaves every module divided after a run.",
        )
    if reduce_dtype not in (None, "bfloat16"):
        raise ConfigurationError(
            f"reduce_dtype={reduce_dtype!r} is not supported.",
            hint='Use "bfloat16": it has the range of float32, so that sums do not overflow; or None.',
        )


MICRO_BATCHES_PER_RANK = 4
"""GPipe's rule: with four micro-batches per rank the bubble is negligible."""


@dataclass(frozen=True)
class RunLayout:
    """How the processes of a run are arranged.

    Args:
        pipeline_parallel_size: ranks in one pipeline.
        data_parallel_size: number of pipelines side by side.
        stages: number of stages the module is cut into.
        tensor_parallel_size: processes that compute a layer together.

    Example:
        >>> layout(world_size=8, pipeline_parallel_size=4)
        RunLayout(pipeline_parallel_size=4, data_parallel_size=2, stages=4, tensor_parallel_size=1)
    """

    pipeline_parallel_size: int
    data_parallel_size: int
    stages: int
    tensor_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline_parallel_size * self.data_parallel_size * self.tensor_parallel_size


@dataclass(frozen=True)
class BatchEquation:
    """What one optimizer step is made of.

    Args:
        batch: samples of one batch of one pipeline.
        micro_batches: number of micro-batches of that batch.
        data_parallel_size: number of pipelines.
        accumulation: batches per optimizer step (``accumulate_grad_batches``).

    Example:
        >>> print(BatchEquation(batch=32, micro_batches=8, data_parallel_size=2, accumulation=4))
        256 samples per optimizer step = 32 (batch) x 2 (replicas) x 4 (accumulation); batch = 8 micro-batches x 4
    """

    batch: int
    micro_batches: int
    data_parallel_size: int = 1
    accumulation: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.batch * self.data_parallel_size * self.accumulation

    @property
    def sizes(self) -> list[int]:
        """Samples of every micro-batch."""
        return micro_batch_sizes(self.batch, self.micro_batches)

    def __str__(self) -> str:
        factors = f"{self.batch} (batch) x {self.data_parallel_size} (replicas) x {self.accumulation} (accumulation)"
        split = f"{several(self.micro_batches, 'micro-batch')} x {_range(self.sizes)}"
        return f"{self.global_batch} samples per optimizer step = {factors}; batch = {split}"


def layout(
    world_size: int,
    pipeline_parallel_size: int | Auto = "auto",
    data_parallel_size: int | Auto = "auto",
    stages: int | Auto = "auto",
    tensor_parallel_size: int = 1,
) -> RunLayout:
    """Arranges the processes: world size = pipeline_parallel_size x data_parallel_size x tensor_parallel_size.

    Args:
        world_size: number of processes that came up.
        pipeline_parallel_size: ranks in one pipeline; ``"auto"``: all that ``data_parallel_size`` leaves.
        data_parallel_size: number of pipelines; ``"auto"``: what ``pipeline_parallel_size`` leaves, otherwise 1.
        stages: number of stages, at least one per rank; ``"auto"``: one per rank.
        tensor_parallel_size: processes that compute a layer together.

    Returns:
        The sizes as numbers.

    Raises:
        ConfigurationError: the numbers do not fit together; the message shows the arithmetic and what would fit.

    Example:
        >>> layout(world_size=8, data_parallel_size=2)
        RunLayout(pipeline_parallel_size=4, data_parallel_size=2, stages=4, tensor_parallel_size=1)
    """
    _check_count("tensor_parallel_size", tensor_parallel_size)
    world_size = _quotient(world_size, "tensor_parallel_size", tensor_parallel_size)
    sizes = {"pipeline_parallel_size": pipeline_parallel_size, "data_parallel_size": data_parallel_size}
    for name, value in {**sizes, "stages": stages}.items():
        _check_count(name, value)
    ranks, replicas = _factors(world_size, pipeline_parallel_size, data_parallel_size)
    count = ranks if stages == "auto" else stages
    if count < ranks:
        raise ConfigurationError(
            f"{several(count, 'stage')} cannot occupy {several(ranks, 'rank')}: each holds at least 1.",
            hint=f"Use stages={ranks} or more, or pipeline_parallel_size={count} or less.",
        )
    return RunLayout(ranks, replicas, count, tensor_parallel_size)


def micro_batch_count(batch: int, ranks: int, micro_batches: int | Auto = "auto", least: int = 1) -> int:
    """Number of micro-batches a batch is cut into: never more than it has samples.

    Args:
        batch: samples of the batch.
        ranks: ranks in one pipeline.
        micro_batches: the number wanted. ``"auto"``: up to four per rank, the largest number that divides the batch
            evenly; where all such are small, the smallest one whose micro-batches hold no more samples than with four
            per rank.
        least: samples that every micro-batch needs.

    Returns:
        The number of micro-batches, at least 1.

    Raises:
        ConfigurationError: the batch is empty or the number is not positive.

    Example:
        >>> micro_batch_count(batch=30, ranks=4), micro_batch_count(batch=13, ranks=2)
        (15, 7)
        >>> micro_batch_count(batch=3, ranks=4, micro_batches=8)
        3
        >>> micro_batch_count(batch=5, ranks=4, micro_batches=4, least=2)
        2
    """
    _check_count("micro_batches", micro_batches)
    if batch < 1:
        raise ConfigurationError(f"A batch of {batch} samples cannot be cut into micro-batches.")
    if micro_batches != "auto":
        return min(micro_batches, max(1, batch // least))
    most = min(MICRO_BATCHES_PER_RANK * ranks, max(1, batch // least))
    even = max(m for m in range(1, most + 1) if batch % m == 0)
    if 2 * even >= most and (even > 1 or most == 1):
        return even
    size = -(-batch // most)
    return -(-batch // size)


def micro_batch_sizes(batch: int, micro_batches: int) -> list[int]:
    """Samples of every micro-batch; the first ones take the remainder, as in ``torch.tensor_split``.

    Example:
        >>> micro_batch_sizes(10, 4)
        [3, 3, 2, 2]
    """
    size, remainder = divmod(batch, micro_batches)
    return [size + (index < remainder) for index in range(micro_batches)]


def micro_batch_weights(amounts: Sequence[float], total: float | None = None) -> list[float]:
    """What the loss of every micro-batch counts: its share of all samples (or tokens, or what ``loss_weight`` says).

    Args:
        amounts: samples of every micro-batch of this pipeline's batch.
        total: samples of the batches of all pipelines together; ``None``: there is one pipeline.

    Returns:
        Weights that sum to 1 over all pipelines, so that losses and gradients are summed, never averaged.

    Raises:
        ConfigurationError: an amount is negative or they sum to zero.

    Example:
        >>> micro_batch_weights([3, 3, 2], total=16)
        [0.1875, 0.1875, 0.125]
    """
    whole = sum(amounts) if total is None else total
    if whole <= 0 or any(amount < 0 for amount in amounts):
        raise ConfigurationError(
            f"The weights of the micro-batches are {list(amounts)}, {whole} in total.",
            hint="They must not be negative, and their sum must be positive; look at loss_weight.",
        )
    return [amount / whole for amount in amounts]


def _factors(world_size: int, ranks: int | Auto, replicas: int | Auto) -> tuple[int, int]:
    if ranks == "auto" and replicas == "auto":
        return world_size, 1
    if ranks == "auto":
        return _quotient(world_size, "data_parallel_size", replicas), int(replicas)
    if replicas == "auto":
        return ranks, _quotient(world_size, "pipeline_parallel_size", ranks)
    if ranks * replicas != world_size:
        raise ConfigurationError(
            f"pipeline_parallel_size={ranks} x data_parallel_size={replicas} = {ranks * replicas} processes, "
            f"but the world size is {world_size}.",
            hint=f"Start {ranks * replicas} processes (Trainer(devices=…, num_nodes=…)), or leave one of the two "
            'sizes at "auto".',
        )
    return ranks, replicas


def _quotient(world_size: int, name: str, size: int | Auto) -> int:
    whole = int(size)
    if world_size % whole:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigurationError(
            f"The world size {world_size} is not divisible by {name}={whole} ({world_size} / {whole} = "
            f"{world_size / whole:.2f}).",
            hint=f"Use {name}={divisors}, or start a multiple of {whole} processes.",
        )
    return world_size // whole


def _check_count(name: str, value: object) -> None:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigurationError(f'{name}={value!r}: a positive whole number or "auto" is needed.')


def _range(sizes: Sequence[int]) -> str:
    return str(max(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
