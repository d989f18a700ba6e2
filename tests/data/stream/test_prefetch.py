from __future__ import annotations

import threading
from collections.abc import Generator

import pytest
import torch

from lowrank_cnn.data.streamed import Made, ahead


class Batches:
    """Numbers as batches, what is made of them counted, and closed or not."""

    def __init__(self, n: int, fails_at: int | None = None) -> None:
        self.n, self.fails_at = n, fails_at
        self.made, self.closed, self.threads = 0, False, set()

    def __call__(self) -> Generator[Made[int], None, None]:
        try:
            for number in range(self.n):
                if number == self.fails_at:
                    raise OSError("the disk is gone")
                self.threads.add(threading.current_thread())
                self.made += 1
                yield number, (torch.tensor(number),)
        finally:
            self.closed = True


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches ahead")]


@pytest.mark.parametrize("n", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_all_batches_come_in_their_order_from_one_other_thread(n: int, depth: int) -> None:
    batches = Batches(n)
    assert [(told, int(images)) for told, (images,) in ahead(batches(), None, depth=depth)] == [
        (number, number) for number in range(n)
    ]
    assert len(batches.threads) == min(n, 1)
    assert threading.main_thread() not in batches.threads
    assert (batches.closed, alive()) == (True, [])


def test_no_more_are_made_than_may_be_ahead() -> None:
    batches = Batches(100)
    made = ahead(batches(), None, depth=2)
    for number in range(5):
        assert next(made)[0] == number
        assert batches.made <= number + 3
    made.close()
    assert batches.made <= 7


def test_the_next_is_in_the_making_while_one_is_in_use() -> None:
    begun = threading.Event()

    def two() -> Generator[Made[int], None, None]:
        yield 0, ()
        begun.set()
        yield 1, ()

    made = ahead(two(), None)
    next(made)
    assert begun.wait(timeout=60)  # though nobody has asked for it
    made.close()


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_error_comes_up_where_its_batch_would_have(fails_at: int) -> None:
    batches = Batches(5, fails_at)
    made = ahead(batches(), None)
    assert [next(made)[0] for _ in range(fails_at)] == list(range(fails_at))
    with pytest.raises(OSError, match="the disk is gone"):
        next(made)
    assert (batches.closed, alive()) == (True, [])


def test_closed_early_the_thread_ends() -> None:
    batches = Batches(100)
    source = batches()
    made = ahead(source, None)
    next(made)
    assert len(alive()) == 1
    made.close()
    assert (batches.closed, alive()) == (True, [])
    assert list(source) == []
    for _ in ahead(Batches(100)(), None):
        break  # dropped, not closed
    assert alive() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_stream_in_use_waits_for_what_another_makes() -> None:
    stream = torch.cuda.Stream()

    def slow() -> Generator[Made[int], None, None]:
        for number in range(8):
            assert torch.cuda.current_stream() == stream
            zeros = torch.zeros(2**20, device="cuda")
            torch.cuda._sleep(20_000_000)
            yield number, (zeros + number,)

    for number, (made,) in ahead(slow(), stream):
        torch.cuda._sleep(1_000_000)
        assert made.sum().item() == number * 2**20
