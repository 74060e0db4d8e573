"""The seeds of a run: alike on the ranks of a pipeline, different for everything else."""

from __future__ import annotations

from lightning_pipe.trainer.seeds import Seeds


def test_ranks_of_a_pipeline_agree() -> None:
    one, other = Seeds(7, 0), Seeds(7, 0)
    assert [one.evaluation(), one.transfer(), one.training(3)] == [
        other.evaluation(),
        other.transfer(),
        other.training(3),
    ]


def test_purposes_batches_and_replicas_differ() -> None:
    seeds, replica = Seeds(7, 0), Seeds(7, 1)
    found = [
        *(seeds.training(batch) for batch in range(3)),
        *(own.evaluation() for own in (seeds, seeds, replica)),
        *(own.transfer() for own in (seeds, seeds, replica)),
        Seeds(8, 0).training(0),
    ]
    assert len(set(found)) == len(found)
