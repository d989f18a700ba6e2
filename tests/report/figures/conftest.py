import pytest


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the random images that a receptive field is averaged over."""
    monkeypatch.setattr("lowrank_cnn.report.network_figures.PIXELS", 160**2)
