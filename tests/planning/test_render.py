"""The printed plan and the closing line."""

from __future__ import annotations

from torch import nn

from lightning_pipe import plan
from lightning_pipe.config import BatchEquation, RankOrder, layout
from lightning_pipe.planning.render import Plan, StagePlan, closing_line, node_facts, plan_text
from lightning_pipe.transport.topology import Topology

PLAN = Plan(
    model="LitGPT",
    stages=(
        StagePlan(0, (1, 3), tuple(f"model.h.{i}" for i in range(3)), 60_000_000, 60_000_000, 960_000_000),
        StagePlan(1, (0, 2), ("model.h.3",), 64_300_000, 4_000_000, 321_000_000),
    ),
    layout=layout(4, pipeline_parallel_size=2),
    schedule="1f1b",
    batch=BatchEquation(batch=32, micro_batches=8, data_parallel_size=2, accumulation=4),
    bubble=1 / 9,
    ties=(("model.wte.weight", (0, 1)),),
    notes=("caches are switched off in training",),
)

EXPECTED = """\
Pipeline of LitGPT
┏━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┓
┃ Stage ┃ Ranks ┃ Layers                           ┃           Parameters ┃  Memory ┃
┡━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━┩
│ 0     │ 1, 3  │ model.h.0 … model.h.2 (3 layers) │                 60 M │ 916 MiB │
│ 1     │ 0, 2  │ model.h.3                        │ 64.3 M (4 M trained) │ 306 MiB │
└───────┴───────┴──────────────────────────────────┴──────────────────────┴─────────┘
Ranks     4 = 2 ranks in a pipeline x 2 replicas
Batch     256 samples per optimizer step = 32 (batch) x 2 (replicas) x 4 (accumulation); batch = 8 micro-batches x 4
Schedule  1f1b, predicted bubble 11.1 %
Tied      model.wte.weight on stages 0, 1
Note      caches are switched off in training"""


def test_the_plan_reads_like_this() -> None:
    assert plan_text(PLAN, width=120) == EXPECTED


def test_the_plan_fits_a_narrow_terminal() -> None:
    text = plan_text(PLAN, width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert "model.h.3" in text


def test_markup_in_names_is_left_alone() -> None:
    stage = StagePlan(0, (0,), ("net[0]", "net[/bold]"), 1, 1, 1)
    assert "net[0] … net[/bold]" in plan_text(Plan("M[red]", (stage,), layout(1), "gpipe"))


def test_closing_line_leaves_out_what_is_unknown() -> None:
    assert closing_line(1, 0.0, 0, None, None) == "Pipeline: 1 batch, no time measured"
    assert closing_line(2, 1.0, 8, 0.1, None) == "Pipeline: 2 batches, 8 samples/s; bubble predicted 10.0 %"


def test_the_plan_says_which_ranks_share_a_node() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    told: dict[RankOrder, str] = {"pipeline": "the ranks of a pipeline", "replicas": "the holders of a stage"}
    for order, neighbours in told.items():
        lines = " ".join(str(plan(module, 2, batch=16, replicas=2, nodes=2, rank_order=order)).split())
        assert f"Nodes node 0 has ranks 0, 1; node 1 has ranks 2, 3 {neighbours} are neighbours" in lines
    assert "Nodes" not in str(plan(module, 2, batch=16, replicas=2))
    assert [line for _, line in node_facts(Topology(64, node_size=8))] == [
        "node 0 has ranks 0, 1, 2, …, 7; node 1 has ranks 8, 9, 10, …, 15; …; node 7 has ranks 56, 57, 58, …, 63"
    ], "both orders of one pipeline are the same"
