"""What is refused, in one sentence each."""

from __future__ import annotations

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.schemes import NAMES, SCHEMES, parse_scheme


def test_every_name_has_a_scheme():
    assert set(NAMES) == set(SCHEMES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr(branches, channel_groups=2)", "either branches or channel_groups"),
        ("lr(branches=perhaps)", "branches is yes or no"),
        ("separable(branches)", "takes m and shapes, not branches"),
        ("lr(channel_groups=0)", "channel_groups in the scheme lr must be positive"),
        ("lr(channel_groups=0.5)", "channel_groups in a scheme is a whole number"),
        ("separable(channel_groups=2)", "takes m and shapes, not channel_groups"),
        ("mixture(kx1, m=4)", "need a join"),
        ("cp(kx1)", "takes m alone"),
        ("separable(1xk, 1x5)", "one upright and one lying"),
    ],
)
def test_options_that_do_not_go_together_are_refused(text: str, words: str):
    with pytest.raises(LowRankError, match=words):
        parse_scheme(text)
