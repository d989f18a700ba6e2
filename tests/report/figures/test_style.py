from __future__ import annotations

from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.report.style import CYCLE, FORMATS, check_format, image_axes, new_figure, save, style

matplotlib = pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")


def test_the_style_leaves_nobody_elses_figures_changed():
    before = dict(matplotlib.rcParams)
    with style():
        assert matplotlib.rcParams["axes.grid"]
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_figure_is_the_same_file_every_time(kind: str, tmp_path: Path):
    def drawn(name: str) -> bytes:
        with style():
            figure = new_figure(2.0, 2.0)
            axes = figure.add_subplot()
            axes.plot([0, 1], [1, 0], color=CYCLE[0])
            image_axes(axes)
            assert not any(spine.get_visible() for spine in axes.spines.values())
            return save(figure, tmp_path / f"{name}.{kind}").read_bytes()

    assert drawn("a") == drawn("b")


def test_other_formats_are_refused():
    assert [check_format(Path(f"a.{kind.upper()}")) for kind in FORMATS] == list(FORMATS)
    with pytest.raises(LowRankError, match="svg, pdf, png"):
        check_format(Path("a.gif"))
