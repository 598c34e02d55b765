"""As much of PyTorch as NVFLARE 2.9 needs to turn arrays into tensors, and back."""

from __future__ import annotations

from typing import Any

import numpy as np


class Tensor:
    """A tensor around an array. NVFLARE cannot send it."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape

    def __add__(self, other: float) -> Tensor:
        return Tensor(self.array + other)

    def __sub__(self, other: Tensor) -> Tensor:
        return Tensor(self.array - other.array)

    def detach(self) -> Tensor:
        """Gives itself: there are no gradients."""
        return self

    def cpu(self) -> Tensor:
        """Gives itself: there are no devices."""
        return self

    def numpy(self) -> Any:
        """Gives the array."""
        return self.array


def as_tensor(array: Any) -> Tensor:
    """Makes a tensor of an array."""
    return Tensor(array)
