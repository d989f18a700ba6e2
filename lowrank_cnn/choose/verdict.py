"""`answer`: the questions that were written down before the runs, answered from a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

from torch import Tensor

from lowrank_cnn.choose.candidates import base_name
from lowrank_cnn.choose.frontier import DENSE_NAME, RECORD, DesignRow, Frontier, load_frontier, shared_settings
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import read_json
from lowrank_cnn.core.numbers import holm, mean_interval, student_p, student_t


@dataclass(frozen=True)
class PairedGap:
    """Ours less theirs in percentage points, its interval, and the p-value of the claim.

    `of_images` is the variance that other images would bring, `of_runs` that of one run on each side, as shares
    squared.
    """

    points: float
    low: float
    high: float
    p: float
    of_images: float = 0.0
    of_runs: float = 0.0

    @property
    def decided(self) -> bool:
        """Whether the interval is on one side of zero."""
        return self.low > 0 or self.high < 0


def paired_gap(ours: Tensor, theirs: Tensor, *, margin: float, alpha: float) -> PairedGap:
    """Answers [runs, images] of two designs; the interval leaves a share `alpha` outside, half on each side.

    `p` is for the claim that the gap is above `margin` points, by Student's t with the degrees of freedom of
    Satterthwaite (1946). Other seeds would give other runs, and other test images other answers: runs and images
    are two crossed random effects. An image counts by the difference of the two designs on it.
    """
    by_image = ours.double().mean(0) - theirs.double().mean(0)
    points, images = 100 * by_image.mean().item(), len(by_image)
    if images < 2:
        return PairedGap(points, -100.0, 100.0, 1.0)
    variance = of_images = by_image.var().item() / images
    of_runs = 0.0
    uncertainty = variance**2 / (images - 1)
    for side in (ours, theirs):
        if len(side) > 1:
            between, noise = _run_parts(side)
            # The noise of single runs on single images is in the variance over images already.
            variance += max(0.0, between - noise) / len(side)
            uncertainty += (between / len(side)) ** 2 / (len(side) - 1)
            of_images -= noise / len(side)
            of_runs += max(between, noise)
    if not variance:  # all runs gave the same answers
        return PairedGap(points, points, points, float(points <= margin))
    freedom, error = max(1.0, variance**2 / uncertainty), 100 * variance**0.5
    reach = student_t(1 - alpha / 2, freedom) * error
    low, high = max(-100.0, points - reach), min(100.0, points + reach)
    p = student_p((margin - points) / error, freedom)
    return PairedGap(points, low, high, p, max(0.0, of_images), of_runs)


def _run_parts(runs: Tensor) -> tuple[float, float]:
    """The variance between the means of runs, and the part of it that is the noise of single answers."""
    runs, images = runs.double(), runs.shape[1]
    noise = (runs - runs.mean(1, keepdim=True)).sub(runs.mean(0) - runs.mean()).square().sum().item()
    return runs.mean(1).var().item(), noise / ((len(runs) - 1) * (images - 1)) / images


BETTER, FASTER, SEARCHED = "better", "faster", "better than a searched rival"
YES, NO, OPEN, EARLY, UNEQUAL = "yes", "no", "undecided", "too few runs", "tuned unequally"
UNTUNED, DIVERGED = "not tuned", "some runs diverged"
UNEQUAL_TIME = 1.1
"""From this share of its time on, a rival is faster: newer kernels have changed what was of equal time."""


@dataclass(frozen=True)
class Answer:
    """The answer of a record to one question about one design.

    `gap` is the design's accuracy less the control's, in points, with its interval; `time` and `params` are the
    design's time and parameters as shares of the control's, `time_within` the 95% interval of the time over
    processes, if there were several. `p` is for a gap above `margin`, and `corrected` the same among all questions
    on this network and these images. `notes` say what weakens the verdict.
    """

    question: str
    design: str
    control: str
    margin: float
    time: float | None
    gap: float
    low: float
    high: float
    p: float
    corrected: float
    verdict: str
    runs: tuple[int, int]
    params: float
    notes: tuple[str, ...]
    time_within: tuple[float, float] | None = None


def read_questions() -> dict[str, Any]:
    return read_json(Path(__file__).with_name("questions.json"))


def question_set(found: Frontier, questions: Mapping[str, Any]) -> dict[str, Any] | None:
    """The questions about the family on the images of a record; None if there are none."""
    family, data = found.about["family"], found.about["data"]["name"].lower()
    return next((one for one in questions["sets"] if one["family"] == family and one["data"] in data), None)


def answer(found: Frontier) -> list[Answer]:
    """Every question that a record can answer, corrected for all on the same network and images together.

    Records in folders beside this one count, too: their questions are those of their last answers.
    A verdict is yes where the corrected p is below alpha, no where the interval lies below the margin, and
    undecided else. There is none yet with fewer runs than were registered, none where one side had other tries of
    the learning rate or neither had any, and none where runs diverged: the others alone would look better than
    the design is.
    """
    questions = read_questions()
    asked = question_set(found, questions)
    if asked is None:
        return []
    alpha, beside, answers = questions["alpha"], _beside(found), []
    settings = shared_settings(found.about)
    alike = [found, *(other for other in beside if shared_settings(other.about) == settings)]
    for question, margin, row, control in _pairs(found, questions, asked):
        ours, theirs = found.right_answers(row), found.right_answers(control)
        gap = paired_gap(ours, theirs, margin=margin, alpha=alpha)
        time, low, high = time_share(row, control) or (None, 0.0, 0.0)
        values = (gap.points, gap.low, gap.high, gap.p, gap.p, OPEN, (len(ours), len(theirs)))
        more = (row.params / control.params, _notes(alike, row, control), (low, high) if low < high else None)
        answers.append(Answer(question, row.name, control.name, margin, time, *values, *more))
    every = [*(one.p for one in answers), *(one["p"] for other in beside for one in other.answers)]
    return [
        replace(one, corrected=p, verdict=_verdict(found, one, p, alpha, asked.get("seeds", 1)))
        for one, p in zip(answers, holm(every), strict=False)
    ]


def _pairs(
    found: Frontier, questions: Mapping[str, Any], asked: Mapping[str, Any]
) -> Iterator[tuple[str, float, DesignRow, DesignRow]]:
    """Each question with its margin, the design and the control.

    A record with dense networks that were not trained is that of a search, whose question is about all rivals.
    """
    factors = {BETTER: 1 - questions["timing"]["tolerance"], FASTER: 1 / questions["time_share"]}
    about, rivals = ("family", "data"), [one for one in found.rows if one.dense and one.name != DENSE_NAME]
    searched = [one for one in questions["searched"] if all(one[what] == asked[what] for what in about)]
    for row in (row for row in found.rows if row.runs and not row.dense):
        margin = next((one["better_by"] for one in searched if one["design"] == row.name), None)
        if margin is not None and not all(one.runs for one in rivals):
            yield from ((SEARCHED, margin, row, control) for control in rivals if control.runs)
        elif base_name(row.name) in questions["designs"] and row.timing and "better_by" in asked:
            for question, margin in ((BETTER, asked["better_by"]), (FASTER, -asked["loss"])):
                if control := control_of(found, row, question, factors[question]):
                    yield question, margin, row, control


def _beside(found: Frontier) -> list[Frontier]:
    """The other records of the same network and images, in folders beside this one."""
    own, others = found.folder.resolve(), []
    for path in sorted(own.parent.glob(f"*/{RECORD}")):
        with suppress(LowRankError):  # not a record of this version: it has no answers to count
            others += [load_frontier(path)] if path.parent != own else []
    same = ("family", "network", "data")
    return [other for other in others if all(other.about[what] == found.about[what] for what in same)]


def _notes(records: Sequence[Frontier], row: DesignRow, control: DesignRow) -> tuple[str, ...]:
    """What weakens a verdict; the records were trained alike, and the control is of the first."""
    notes, share = [], time_share(row, control)
    if share and share[0] > UNEQUAL_TIME:
        notes.append(f"{control.name} takes only {1 / share[0]:.2f} of the time")
    for one in (row, control):
        rates = [tried.rate for tried in one.tries if tried.accuracies]
        if rates and one.rate in (min(rates), max(rates)):
            notes.append(f"the best rate of {one.name}, {one.rate:g}, is at the edge of those tried")
    smaller = {
        one.name: found.top1(one) - records[0].top1(control)
        for found in reversed(records)  # a network of the first record counts as it is there
        for one in found.rows
        if one.dense and one.branched is control.branched and one.macs < control.macs and len(one.runs) > 1
    }
    best = max(smaller, key=smaller.__getitem__, default="")
    if best and smaller[best] > 0:
        notes.append(f"{best}, with fewer MACs, is {smaller[best]:.2f} points above {control.name}")
    return tuple(notes)


def time_share(ours: DesignRow, theirs: DesignRow) -> tuple[float, float, float] | None:
    """Our time as a share of theirs with the ends of its 95% interval over processes; one timing has no width."""
    if not (ours.timing and theirs.timing):
        return None
    pairs = zip(reversed(ours.timing.ratios), reversed(theirs.timing.ratios), strict=False)
    shares = [one / other for one, other in pairs]  # a network that came later was not in the first processes
    if len(shares) == 1:
        return shares[0], shares[0], shares[0]
    # Student's t, not the range, which holds the true share of three processes in three of four cases only.
    share, low, high = (exp(value) for value in mean_interval([log(share) for share in shares]))
    return share, low, high


def control_of(found: Frontier, design: DesignRow, question: str, factor: float) -> DesignRow | None:
    """The strongest dense network of a time, which is the design's times a factor.

    That is the first that takes at least as long, or a larger one that takes less: GPUs run some widths faster
    than smaller ones. To be better, a design has larger rivals too that do not surely take longer; to be faster,
    it needs one that surely takes so long. A design with branches is compared with dense networks that have
    branches.
    """
    dense = [row for row in found.rows if row.dense and row.branched is design.branched and row.runs]
    shares = [(row, share) for row in dense if (share := time_share(row, design))]
    if question == BETTER:
        longest = min((share for _, (share, *_) in shares if share >= factor), default=0.0)
        return max((row for row, (_, low, _) in shares if low <= longest), key=lambda row: row.macs, default=None)
    for longest in sorted(share for _, (share, low, _) in shares if low >= factor):
        row, (_, low, high) = max((one for one in shares if one[1][0] <= longest), key=lambda one: one[0].macs)
        if low >= factor or low == high:  # by one timing, the larger one may be faster
            return row
    return None


def _verdict(found: Frontier, one: Answer, p: float, alpha: float, least_runs: int) -> str:
    rows = [row for row in found.rows if row.name in (one.design, one.control)]
    ours, theirs = ({(each.rate, len(each.accuracies)) for each in row.tries if each.accuracies} for row in rows)
    if ours != theirs or not ours:
        return UNEQUAL if ours or theirs else UNTUNED
    if any(row.failed for row in rows):
        return DIVERGED
    if min(one.runs) < least_runs:
        return EARLY  # looking early and often finds what is not there
    return YES if p < alpha else NO if one.high < one.margin else OPEN


def add_answers(found: Frontier, *, keep: bool = True) -> list[Answer]:
    """Answer, and keep the answers in the record on disk, unless it is only looked at."""
    answers = answer(found)
    found.answers = [asdict(one) for one in answers]
    if keep:
        found.save()
    return answers
