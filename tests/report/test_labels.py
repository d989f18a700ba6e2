from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.report.labels import CLEAR, FAR, MARK, Box, around, arrange

PAPER = Box(0, 0, 400, 250)
PLACES = st.lists(st.tuples(st.floats(10, 390), st.floats(10, 240)), max_size=9)


@settings(max_examples=60)
@given(PLACES, st.floats(10, 90))
def test_no_label_lies_on_another_or_on_a_mark(places: list[tuple[float, float]], width: float):
    spots = arrange(places, [(width, 9.0)] * len(places), PAPER)
    boxes = [spot.box(place, (width, 9.0)) for spot, place in zip(spots, places, strict=True) if spot]
    for i, box in enumerate(boxes):
        assert box.inside(PAPER)
        assert not any(box.meets(other) for other in boxes[:i])
        assert not any(box.meets(around(x, y, MARK)) for x, y in places)


def test_where_there_is_room_every_label_is_near():
    places = [(50.0, 50.0), (200.0, 100.0), (300.0, 200.0)]
    spots = arrange(places, [(60.0, 9.0)] * 3, PAPER)
    assert all(spot is not None and spot.distance <= FAR for spot in spots)


def test_a_crowd_is_labelled_by_lines():
    places = [(180.0 + 14 * step, 120.0 + 5 * step) for step in range(5)]
    spots = arrange(places, [(90.0, 9.0)] * 5, Box(100, 0, 320, 250))
    assert None not in spots
    assert any(spot is not None and spot.distance > FAR for spot in spots)


def test_a_label_too_wide_for_the_paper_is_left_out():
    assert arrange([(200.0, 100.0)], [(500.0, 9.0)], PAPER) == [None]


def test_labels_keep_off_lines():
    line = Box(0, 99, 400, 101)
    (spot,) = arrange([(200.0, 100.0)], [(60.0, 9.0)], PAPER, [line])
    assert spot is not None
    assert not spot.box((200.0, 100.0), (60.0, 9.0)).meets(line)


def test_a_label_without_a_line_is_near_its_own_mark_alone():
    places = [(100.0, 100.0), (96.0, 111.0), (110.0, 92.0)]
    spots = arrange(places, [(40.0, 9.0)] * 3, Box(0, 0, 300, 300))
    for i, spot in enumerate(spots):
        assert spot is not None
        box = spot.box(places[i], (40.0, 9.0))
        others = [box.gap(place) for j, place in enumerate(places) if j != i]
        assert spot.distance > FAR or min(others) >= CLEAR * box.gap(places[i])
