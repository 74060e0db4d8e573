"""Lightning's finetuning callback compares parameters of other ranks by what these say of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_pipe.patches import replacements
from lightning_pipe.trainer.whole_model.finetuning import _digest, values_compared


def test_equal_parameters_of_other_ranks_are_left_out() -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abc"})
    with torch.no_grad():
        module["c"].add_(1)
    of_other_rank = {name: _digest(module[name]) for name in "ab"}
    with torch.no_grad():  # this rank does not have the values
        module["a"].fill_(5)
        module["b"].fill_(6)
    pipeline: Any = SimpleNamespace(
        module=module,
        holds=lambda name: name == "c",
        ownership=SimpleNamespace(counted=lambda _: True),
        transport=SimpleNamespace(all_gather_object=lambda mine, _: [mine, of_other_rank]),
        pipeline_members=(0, 1),
    )
    optimizer = torch.optim.SGD([module["a"]], lr=0.1)
    before = vars(BaseFinetuning)["filter_on_optimizer"]
    with values_compared(pipeline):
        assert (BaseFinetuning, "filter_on_optimizer") in replacements()
        kept = BaseFinetuning.filter_on_optimizer(optimizer, [module["b"], module["c"]])
    assert [id(parameter) for parameter in kept] == [id(module["c"])]
    assert vars(BaseFinetuning)["filter_on_optimizer"] is before
