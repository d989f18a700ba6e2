from pathlib import Path

import pytest

from lowrank_cnn.report import read_records
from lowrank_cnn.report.page import Card, cards, certainty, headline
from lowrank_cnn.report.results import gather

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_cards_tell_the_most_accurate_and_the_cheapest_comparable_network():
    found = cards(gather(read_records([RESULTS / "cifar10"])))
    assert [(card.title, card.network) for card in found] == [
        ("Most accurate low-rank network", "nin-c3"),
        ("Cheapest within 1 point", "nin-c3-lr, 150 epochs"),
    ]
    assert found[0].difference == "+0.64 points"
    assert "0.75 MACs" in found[0].cost
    assert found[0].sure == "95% interval +0.37 to +0.92: surely more accurate."


def test_a_network_that_lost_much_is_no_gain_however_cheap():
    found = cards(gather(read_records([RESULTS / "tiny-imagenet" / "paper"])))
    assert found[0].network == "vgg11-gmp-lr-join-wfull"
    assert not any("lde" in card.network for card in found)


def test_without_a_trained_twin_there_is_nothing_to_tell():
    assert cards(gather(read_records([RESULTS / "cifar10" / "init"]))) == []


def a_card(*, gain: bool) -> Card:
    return Card("", "", "", "", "", "", "", "", "good" if gain else "bad", gain)


@pytest.mark.parametrize(
    ("gains", "title"),
    [
        ((True, True), "What low rank gained"),
        ((True, False), "Low-rank networks beside their dense twins"),
        ((False,), "Low-rank networks beside their dense twins"),
        ((), "Networks trained and timed"),
    ],
)
def test_the_page_speaks_of_a_gain_only_where_every_card_shows_one(gains: tuple, title: str):
    assert headline([a_card(gain=gain) for gain in gains]) == title


def test_a_card_tells_a_gain_from_a_loss():
    assert headline(cards(gather(read_records([RESULTS / "cifar10"])))) == "What low rank gained"
    lost = cards(gather(read_records([RESULTS / "tiny-imagenet" / "paper"])))
    assert [card.gain for card in lost] == [card.mood == "good" for card in lost]
    assert not all(card.gain for card in lost)


@pytest.mark.parametrize(
    ("gap", "reach", "says", "mood"),
    [
        (0.5, 0.3, "surely more accurate", "good"),
        (-0.1, 0.3, "no loss of more than 1 point", "good"),
        (-2.0, 0.3, "surely less accurate", "bad"),
        (-0.8, 0.9, "do not decide", "quiet"),
        (3.0, None, "Too few seeds", "quiet"),
    ],
)
def test_certainty_in_words(gap: float, reach: float | None, says: str, mood: str):
    words, found = certainty(gap, reach)
    assert says in words
    assert found == mood
