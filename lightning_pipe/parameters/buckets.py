"""Cuts parameters into buckets: what is sent at once is neither very small nor all there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.nn import Parameter

BUCKET_BYTES = 25 * 2**20


def buckets(parameters: Sequence[Parameter], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Indices of the parameters of each bucket: one dtype and device, in order, up to the bucket's size."""
    open_buckets: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    sizes: defaultdict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        open_buckets[kind].append(index)
        sizes[kind] += parameter.nbytes
        if sizes[kind] >= bucket_bytes:
            yield open_buckets.pop(kind)
            del sizes[kind]
    yield from open_buckets.values()
