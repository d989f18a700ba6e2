"""Prepare the next batches while one is in use: in a thread, and on a GPU in a stream of its own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

DEPTH = 2

Told = TypeVar("Told")
Made = tuple[Told, tuple[Tensor, ...]]


def ahead(
    batches: Generator[Made[Told], None, None], stream: torch.cuda.Stream | None, *, depth: int = DEPTH
) -> Generator[Made[Told], None, None]:
    """The same batches, with up to `depth` of them prepared while one is in use.

    An error is raised in the place of its batch. Closed early, the thread ends after the batch that it prepares.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches ahead")
    try:
        if stream:  # what batches are made with was put on the device by the stream in use
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        pending = deque(thread.submit(_make, batches, stream) for _ in range(depth))
        while made := pending.popleft().result():
            pending.append(thread.submit(_make, batches, stream))
            (told, tensors), done = made
            _hand_over(tensors, done)
            yield told, tensors
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
        batches.close()


def _make(
    batches: Generator[Made[Told], None, None], stream: torch.cuda.Stream | None
) -> tuple[Made[Told], Any] | None:
    """The next batch and the event that it is ready by; None at the end."""
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        made = next(batches, None)
        return None if made is None else (made, stream.record_event() if stream else None)


def _hand_over(tensors: tuple[Tensor, ...], done: Any) -> None:
    """Let the stream in use wait until the tensors are ready, and their memory until it has read them."""
    if done is None:
        return
    for tensor in tensors:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(done)
        tensor.record_stream(stream)
