"""`transformers` in double precision, also where its code says float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def double_precision() -> Iterator[None]:
    """Inside, every `torch.float`, `torch.float32` and `.float()` of model code means float64.

    The rotary tables, the norms and the softmax ask for float32 by name, whatever the model's type.
    With these in double the golden logits are good to about 1e-13, and an error of the size of a
    float32 rounding shows.
    """
    saved = torch.float, torch.float32, torch.Tensor.float, torch.get_default_dtype()
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(saved[3])
        torch.float, torch.float32 = saved[:2]
        torch.Tensor.float = saved[2]
