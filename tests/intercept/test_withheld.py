"""Stand-ins for tensors of the batch that this rank does not have."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_pipe.engine.containers import fresh
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.withheld import Withheld
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.transport.objects import decode, encode

REAL = torch.rand(6, 2, 4, 4).to(memory_format=torch.channels_last)


def stand_in() -> Withheld:
    return Withheld(TensorSpec.of(REAL), "batch['image']")


@pytest.mark.parametrize("inference", [False, True])
def test_they_have_shapes_and_no_values(inference: bool) -> None:
    own = stand_in()
    with torch.inference_mode(inference):
        parts = own.split([4, 2])
        assert [TensorSpec.of(part) for part in parts] == [TensorSpec.of(part) for part in REAL.split([4, 2])]
        assert torch.cat(parts).shape == REAL.shape
        assert own.to(torch.float16).dtype is torch.float16
        assert own.to("cpu") is own
        assert fresh({"x": own})["x"].stride() == REAL.stride()
        for read in (lambda: own + 1, lambda: own.sum(), lambda: REAL.clone().copy_(own), lambda: own.equal(REAL)):
            with pytest.raises(CutError, match=r"needs batch\['image'\]"):
                read()
    assert repr(parts[1]) == "Withheld(batch['image'], shape=(2, 2, 4, 4), dtype=torch.float32)"


def test_they_travel_without_the_tensor() -> None:
    messages = encode({"image": stand_in(), "number": torch.arange(3)})
    assert sum(message.nbytes for message in messages) <= 4096
    coming = iter(messages)
    found = decode(lambda message: message.copy_(next(coming)), torch.device("cpu"))
    for image in (found["image"], copy.deepcopy(stand_in())):
        assert (TensorSpec.of(image), image.place) == (TensorSpec.of(REAL), "batch['image']")
