"""Choose one of several trained networks, and say so in a sentence with its interval.

The choice is made on images that were held out of training. The figures in the sentence are those of the test
images, which are used once; the interval is that of the verdicts in `docs/frontier.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from torch import Tensor

from lowrank_cnn.choose.frontier import DENSE_NAME
from lowrank_cnn.choose.verdict import PairedGap, paired_gap
from lowrank_cnn.core.errors import check_number, option
from lowrank_cnn.core.text import counted

LOSS = 0.01
"""Without a wish, the network may lose this much accuracy to the best one, if it is faster."""
SAME_TIME = 0.95
"""Times that differ by less count as equal: those of one network repeat to a few percent."""
ALPHA = 0.05
MOST_RUNS = 10
"""More runs of a network than these, `compare` does not make."""


@dataclass(frozen=True)
class Contender:
    """A trained network: its time, its mean accuracy on images held out, and its answers [runs, test images]."""

    name: str
    kind: str
    ms: float
    held_out: float
    right: Tensor

    @property
    def accuracy(self) -> float:
        """The mean accuracy on the test images."""
        return self.right.double().mean().item()

    @property
    def runs(self) -> int:
        return len(self.right)

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.1f}% in {milliseconds(self.ms)}"


@dataclass(frozen=True)
class Wish:
    """A limit of milliseconds for the network, an accuracy that it must reach, both, or neither."""

    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if self.at_most is not None:
            check_number("at_most, in milliseconds,", self.at_most, above=0)
        if self.at_least is not None:
            check_number("at_least, a share between 0 and 1,", self.at_least, above=0, most=1)

    def pick(self, contenders: Sequence[Contender]) -> Contender:
        """The network to take.

        Within `at_most`, that is the most accurate one; with `at_least`, the fastest that reaches it. Without a
        wish it is the fastest one that is within a point of the best. If several are equally fast, the most
        accurate of them is taken. If none fulfils the wish, the one that comes nearest is.
        """
        in_time = [one for one in contenders if self.at_most is None or one.ms <= self.at_most]
        if not in_time:
            return min(contenders, key=lambda one: one.ms)
        best = max(in_time, key=lambda one: one.held_out)
        floor = self.at_least if self.at_least is not None else best.held_out - LOSS * (self.at_most is None)
        good = [one for one in in_time if one.held_out >= floor] or [best]
        fastest = min(one.ms for one in good)
        return max((one for one in good if SAME_TIME * one.ms <= fastest), key=lambda one: one.held_out)

    def unfulfilled(self, taken: Contender) -> str:
        """A sentence about the wish that the chosen network does not fulfil; empty if it fulfils all."""
        if self.at_most is not None and taken.ms > self.at_most:
            return f"None runs in {milliseconds(self.at_most)}."
        if self.at_least is not None and taken.held_out < self.at_least:
            found = f"the best has {100 * taken.held_out:.1f}% of the images held out"
            return f"None reaches {100 * self.at_least:g}%: {found}."
        return ""


@dataclass(frozen=True)
class Choice:
    """The network to take, the one it is compared with, and by how much the first is better on the test images.

    `more` says what a longer budget would decide; it is empty where nothing is open.
    """

    taken: Contender
    rival: Contender | None
    gap: PairedGap | None
    sentence: str
    more: str

    @property
    def decided(self) -> bool:
        """Whether the interval of the gap is on one side of zero."""
        return self.gap is not None and self.gap.decided


def choose(
    contenders: Sequence[Contender],
    wish: Wish,
    *,
    minutes: Callable[[int], float] | None = None,
    length: str = "",
) -> Choice:
    """Take one of the networks, and say so in a sentence.

    `minutes` tells how long so many runs of each take; `length` how long the runs were, if shorter than they
    should be ("4 of 70 epochs").
    """
    taken = wish.pick(contenders)
    rival = _rival(taken, contenders)
    dense = next((one for one in contenders if one.kind == DENSE_NAME), None)
    beside = [one for one in dict.fromkeys((rival, dense)) if one is not None and one is not taken]
    numbers = sorted({one.runs for one in (taken, *beside)})
    runs = f"{counted(numbers[0], 'run')} each" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} runs"
    runs += f", {length}" if length else ""
    start = f"{wish.unfulfilled(taken)} Take {taken.name}: {taken}.".lstrip()
    if rival is None:
        return Choice(taken, None, None, f"{start} ({runs}.)", more="")
    gap = paired_gap(taken.right, rival.right, margin=0.0, alpha=ALPHA)
    if numbers[0] < 2:
        runs += ", so without the chance of other runs"
    others = "; ".join(f"{one.name}{' has' * (place == 0)} {one}" for place, one in enumerate(beside))
    level = "" if gap.decided else "undecided: "
    between = f"{level}{taken.name} over {rival.name} {gap.points:+.1f}, 95%: {gap.low:+.1f} to {gap.high:+.1f}"
    more = "" if gap.decided else _more(taken, rival, gap, minutes)
    return Choice(taken, rival, gap, f"{start} {others} ({runs}; {between}).", more)


def _rival(taken: Contender, contenders: Sequence[Contender]) -> Contender | None:
    """The strongest network of another kind that is as fast, or else that is not the dense one."""
    others = [one for one in contenders if one.kind != taken.kind]
    as_fast = [one for one in others if SAME_TIME * one.ms <= taken.ms]
    cheap = [one for one in others if one.kind != DENSE_NAME]
    return max(as_fast or cheap or others, key=lambda one: one.held_out, default=None)


def _more(taken: Contender, rival: Contender, gap: PairedGap, minutes: Callable[[int], float] | None) -> str:
    """Say how many runs would decide between two networks, where the interval holds zero."""
    wanted = (abs(gap.points) / 100 / 2) ** 2  # the variance at which two standard errors fit into the gap
    between = f"between {taken.name} and {rival.name}"
    if wanted <= gap.of_images:
        images = counted(taken.right.shape[1], "test image")
        told = f"these {images} cannot tell {abs(gap.points):.1f} points apart"
        return f"More runs would not decide {between}: {told}."
    runs = max(taken.runs + 1, ceil(gap.of_runs / (wanted - gap.of_images)))
    if runs > MOST_RUNS:
        return f"It would take about {runs} runs each to decide {between}."
    budget = f", about {option('minutes', ceil(minutes(runs)))}" if minutes else ""
    return f"{runs} runs each would decide {between} if the gap stays{budget}."


def milliseconds(ms: float) -> str:
    """A time with two digits, or three where it begins with a 1.

    >>> milliseconds(3.14159), milliseconds(0.01234), milliseconds(251.3)
    ('3.1 ms', '0.0123 ms', '251 ms')
    """
    if not ms > 0:
        return f"{ms:g} ms"
    digits = 1 - floor(log10(ms)) + (f"{ms:e}"[0] == "1")
    return f"{ms:.{max(0, digits)}f} ms"
