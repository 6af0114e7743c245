"""Tensors on their way from a GPU to the host, without a wait."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

Tag = TypeVar("Tag")  # what the caller wants back with its tensors


class HostCopies(Generic[Tag]):
    """Copies tensors to the host and gives them back in order once they have arrived: nothing waits for a GPU."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tag, list[Tensor], torch.cuda.Event | None]] = deque()

    def add(self, tag: Tag, *tensors: Tensor) -> None:
        """Begins to copy tensors to the host without a wait; ``tag`` comes back with them from :meth:`take`.

        Where none is on a CUDA device they are kept as they are, without a copy: the caller must not change them in
        place.
        """
        done = None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            copies = []
            for tensor in tensors:
                copies.append(tensor.to("cpu", non_blocking=True))
            tensors = tuple(copies)
            done = torch.cuda.Event()
            done.record()
        self._pending.append((tag, list(tensors), done))

    def take(self, wait: bool = False) -> Iterator[tuple[Tag, list[Tensor]]]:
        """Gives copies that have arrived, in the order of :meth:`add`, each once; with ``wait`` it waits for all.

        A copy that has not arrived holds back those after it. Without a CUDA device all have arrived.

        Yields:
            The tag that was given with the tensors, and their copies on the host, in the order of the arguments.
        """
        while self._pending:
            tag, tensors, done = self._pending[0]
            if done is not None:
                if not wait and not done.query():
                    return
                done.synchronize()
            self._pending.popleft()
            yield tag, tensors

    def clear(self) -> None:
        """Forgets copies that were not taken."""
        self._pending.clear()
