"""`answer`: the questions that were written down before the runs, answered from a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.choose.candidates import LEARNED, base_name
from lowrank_cnn.choose.frontier import DesignRow, Frontier
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import UnreadableError, read_json
from lowrank_cnn.core.numbers import holm

# How certain a difference of two designs is: intervals that resample seeds and images.
#
# A run is drawn from all runs that other seeds would give, and a test image from all images that could have been
# taken. Both designs are tested on the same images, so images are resampled for both together, and seeds for
# each by itself. A few runs do not tell exactly how much runs differ. As in Student's t, that widens the
# interval: a 99% interval is twice as wide with four runs of each design, a quarter wider with eight, and hardly
# wider with 32.

RESAMPLES = 100_000


@dataclass(frozen=True)
class PairedGap:
    """Ours less theirs in percentage points, its interval, and how often a resampled gap misses the margin."""

    points: float
    low: float
    high: float
    p: float


def compare(
    ours: Tensor, theirs: Tensor, *, margin: float, alpha: float, resamples: int = RESAMPLES, seed: int = 0
) -> PairedGap:
    """Answers [runs, images] of two designs; the interval leaves a share `alpha` outside, half on each side.

    `p` is for the claim that the gap is above `margin` points.
    """
    points = 100 * float(ours.double().mean() - theirs.double().mean())
    gaps = resampled_gaps(ours, theirs, resamples=resamples, seed=seed)
    low, high = torch.quantile(gaps, torch.tensor([alpha / 2, 1 - alpha / 2], dtype=gaps.dtype)).tolist()
    # One more than were drawn: the gap that was found is one of those that chance could give.
    p = (int((gaps <= margin).sum()) + 1) / (resamples + 1)
    return PairedGap(points, low, high, p)


def resampled_gaps(ours: Tensor, theirs: Tensor, *, resamples: int, seed: int) -> Tensor:
    """Gaps in points over resampled images and seeds.

    Resampling images changes the accuracies of all runs together. They are means over thousands of images, so they
    are drawn from the normal distribution that the bootstrap of a mean tends to, with its very covariance.
    """
    draw = torch.Generator().manual_seed(seed)
    answers = torch.cat([ours, theirs]).double()
    images = answers.shape[1]
    centred = answers - answers.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(centred @ centred.T / images**2)
    # The symmetric root: other roots depend on the signs of eigenvectors, which machines choose differently.
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    noise = torch.randn(resamples, len(answers), generator=draw, dtype=torch.float64)
    shares = answers.mean(1) + noise @ root
    one, other = shares.split([len(ours), len(theirs)], dim=1)
    return (100 * (_over_seeds(one, draw) - _over_seeds(other, draw))).clamp(-100, 100)


def _over_seeds(shares: Tensor, draw: torch.Generator) -> Tensor:
    """Means [resamples] of accuracies [resamples, runs] over runs drawn with replacement.

    The bootstrap of n runs shows (n - 1) / n of the variance: deviations are stretched to make up for it. The
    variance that is estimated from n runs is itself uncertain, as chi-squared with n - 1 degrees of freedom is:
    each resample has its own, which turns the normal distribution of a mean into Student's t.
    """
    runs = shares.shape[1]
    centre = shares.mean(1)
    if runs == 1:
        return centre
    drawn = shares.gather(1, torch.randint(0, runs, shares.shape, generator=draw)).mean(1) - centre
    squares = torch.randn(len(shares), runs - 1, generator=draw, dtype=shares.dtype).square().sum(1)
    return centre + drawn * (runs / squares).sqrt()


QUESTIONS = Path(__file__).with_name("questions.json")
BETTER, FASTER = "better", "faster"
YES, NO, OPEN, EARLY, UNEQUAL = "yes", "no", "undecided", "too few runs", "tuned unequally"
DIVERGED = "some runs diverged"


@dataclass(frozen=True)
class Answer:
    """The answer of a record to one question about one design.

    `gap` is the design's accuracy less the control's, in points, with its interval; `time` the design's time as a
    share of the control's. `p` is for a gap above `margin`, and `corrected` the same among all questions asked.
    """

    question: str
    design: str
    control: str
    margin: float
    time: float
    gap: float
    low: float
    high: float
    p: float
    corrected: float
    verdict: str
    runs: tuple[int, int]


def read_questions(path: Path = QUESTIONS) -> dict[str, Any]:
    """The questions of the package, or of another file of the same form."""
    try:
        return read_json(path)
    except UnreadableError as error:
        raise LowRankError(f"{path} holds no questions: {error}.") from error


def question_set(found: Frontier, questions: Mapping[str, Any]) -> dict[str, Any] | None:
    """The questions about this family on these images, by the name of their folder; None if there are none."""
    family, data = found.about["family"], found.about["data"]["name"].lower()
    return next((one for one in questions["sets"] if one["family"] == family and one["data"] in data), None)


def answer(
    found: Frontier, questions: Mapping[str, Any] | None = None, *, resamples: int = RESAMPLES
) -> list[Answer]:
    """Every question that a record can answer, corrected for all of them together.

    A verdict is yes where the corrected p is below alpha, no where the interval lies below the margin, and
    undecided else. There is none yet with fewer runs than were registered, none where one side had other tries of
    the learning rate, and none where runs diverged: the others alone would look better than the design is. The
    controls are dense networks of the record: the largest of those that take no longer than one of equal time.
    A design that trains with branches has controls that do, too.
    """
    questions = questions or read_questions()
    asked = question_set(found, questions)
    if asked is None:
        return []
    alpha, tolerance = questions["alpha"], questions["timing"]["tolerance"]
    asking = ((BETTER, asked["better_by"], 1 - tolerance), (FASTER, -asked["loss"], 1 / questions["time_share"]))
    answers = []
    for row in found.rows:
        listed = base_name(row.name) in questions["designs"] or row.name.startswith(f"{LEARNED}-")
        if row.dense or not listed or not row.runs or not row.timing:
            continue
        for question, margin, factor in asking:
            control = control_of(found, row, factor)
            if control is None or not control.timing:
                continue
            ours, theirs = found.right_answers(row), found.right_answers(control)
            gap = compare(ours, theirs, margin=margin, alpha=alpha, resamples=resamples)
            time, runs = row.timing.ratio / control.timing.ratio, (len(ours), len(theirs))
            values = (gap.points, gap.low, gap.high, gap.p, gap.p)
            answers.append(Answer(question, row.name, control.name, margin, time, *values, OPEN, runs))
    return [
        replace(one, corrected=p, verdict=_verdict(found, one, p, alpha, asked.get("seeds", 1)))
        for one, p in zip(answers, holm([one.p for one in answers]), strict=True)
    ]


def control_of(found: Frontier, design: DesignRow, factor: float) -> DesignRow | None:
    """The strongest dense network of a time, which is the design's times a factor.

    That is the first that takes at least as long, or a larger one that takes less: GPUs run some widths faster
    than smaller ones. A design with branches is compared with dense networks that have branches.
    """
    dense = [row for row in found.rows if row.dense and row.branched is design.branched and row.runs]
    times = {row.name: row.timing.ratio for row in dense if row.timing}
    assert design.timing is not None
    longest = min((time for time in times.values() if time >= factor * design.timing.ratio), default=None)
    if longest is None:
        return None
    in_time = [row for row in found.rows if times.get(row.name, longest + 1) <= longest]
    return max(in_time, key=lambda row: row.macs)


def _verdict(found: Frontier, one: Answer, p: float, alpha: float, least_runs: int) -> str:
    rows = [row for row in found.rows if row.name in (one.design, one.control)]
    ours, theirs = ({(each.rate, len(each.accuracies)) for each in row.tries if each.accuracies} for row in rows)
    if ours != theirs:
        return UNEQUAL
    if any(row.failed for row in rows):
        return DIVERGED
    if min(one.runs) < least_runs:
        return EARLY  # looking early and often finds what is not there
    return YES if p < alpha else NO if one.high < one.margin else OPEN


def add_answers(found: Frontier, *, resamples: int = RESAMPLES, keep: bool = True) -> list[Answer]:
    """Answer, and keep the answers in the record on disk, unless it is only looked at."""
    answers = answer(found, resamples=resamples)
    found.answers = [asdict(one) for one in answers]
    if keep:
        found.save()
    return answers
