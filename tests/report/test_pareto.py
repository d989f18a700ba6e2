from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.report.pareto import pareto_front

SMALL = st.integers(0, 6).map(float)


def dominated(point: tuple[float, float], by: tuple[float, float]) -> bool:
    return by != point and by[0] <= point[0] and by[1] >= point[1]


@given(st.lists(st.tuples(SMALL, SMALL), max_size=12))
def test_the_front_is_what_nothing_dominates(points: list[tuple[float, float]]):
    expected = {i for i, p in enumerate(points) if not any(dominated(p, q) for q in points)}
    front = pareto_front(points)
    assert set(front) == expected
    assert len(front) == len(expected)
    assert [points[i] for i in front] == sorted(points[i] for i in front)
