"""Tensors of all shapes and strides keep their values on the way through a message."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.transport.message_layout import MessageLayout

BASE = torch.arange(24.0).view(4, 6)

SHAPES: dict[str, Tensor] = {
    "contiguous": BASE,
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "one_row": torch.zeros(1, 1, 1)[:, 0],
    "transposed": BASE.t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "part": BASE[:, 1:4],
    "every_other": BASE[::2, ::3],
    "expanded": BASE[:, :1].expand(4, 6),
    "expanded_part": BASE[:1, 2:5].expand(4, 3),
    "expanded_scalar": torch.tensor(2).expand(3, 2),
    "integers": torch.arange(5).flip(0)[::2],
    "flags": BASE > 7,
    "half": BASE.bfloat16().t(),
    "complex": torch.complex(BASE, -BASE),
    "conjugate": torch.complex(BASE, -BASE).conj(),
    "negative": torch.complex(BASE, -BASE).conj().imag,
    "zero": torch._efficientzerotensor((2, 3), dtype=torch.float32),
    "parameter": nn.Parameter(BASE.clone()),
    "result": nn.Parameter(BASE.clone()) * 2,
}


def sent(tensor: Tensor) -> Tensor:
    """What arrives of a tensor between two others, in a message and in another one that is made of that."""
    spec = TensorSpec.of(tensor)
    layout = MessageLayout(2, (TensorSpec((3,), torch.uint8), spec, TensorSpec((1,), torch.float64)))
    data = layout.pack([1, 2], [torch.ones(3), tensor, torch.ones(1)], torch.device("cpu"))
    tensors, (control, copies) = layout.tensors(data), layout.read(data.data_ptr())
    assert control == [1, 2]
    data.fill_(255)  # the memory is used again
    assert torch.equal(copies[0], torch.ones(3, dtype=torch.uint8))
    assert copies[2].item() == 1
    layout.write(data.data_ptr(), [1, 2], copies)
    assert torch.equal(tensors[1], copies[1])
    assert tensors[1].stride() == copies[1].stride()
    return spec.lay_out(copies[1])


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_strides_arrive(name: str) -> None:
    tensor = SHAPES[name]
    arrived = sent(tensor)
    assert torch.equal(arrived, tensor)
    assert arrived.is_contiguous() == tensor.is_contiguous()
    if not tensor.is_contiguous():
        assert arrived.stride() == tensor.stride()
    placeholder = Placeholder(TensorSpec.of(tensor), torch.device("cpu"))
    assert placeholder.shape == tensor.shape
    assert placeholder.is_contiguous() == tensor.is_contiguous()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_copies_are_tensors_of_their_own(inference: bool, shared: bool) -> None:
    layout = MessageLayout(
        0, (TensorSpec((2,), torch.float32), TensorSpec((0, 3), torch.int64), TensorSpec((3,), torch.bool))
    )
    with torch.inference_mode(inference):
        data = layout.pack([], [torch.ones(2, requires_grad=not inference), None, None], torch.device("cpu"))
        copies = layout.tensors(data) if shared else layout.read(data.data_ptr())[1]
    assert [copy.shape for copy in copies] == [(2,), (0, 3), (3,)]
    assert not any(copy.requires_grad for copy in copies)
    if not inference:
        before = [copy._version for copy in copies]
        copies[0].add_(1)
        assert [copy._version - version for copy, version in zip(copies, before, strict=True)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("tensor", "dense", "overlaps"),
    [
        (BASE, True, False),
        (BASE.t(), True, False),
        (BASE[:, 1:4], False, False),
        (BASE[:, :1].expand(4, 6), False, False),
        (torch.arange(6.0).unfold(0, 3, 1), False, True),
        (torch.arange(6.0).unfold(0, 3, 3), True, False),
    ],
)
def test_kinds_of_strides(tensor: Tensor, dense: bool, overlaps: bool) -> None:
    spec = TensorSpec.of(tensor)
    assert (spec.dense, spec.overlaps) == (dense, overlaps)


def test_sliding_windows_arrive_contiguous() -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    assert torch.equal(sent(windows), windows)
    assert sent(windows).is_contiguous()
