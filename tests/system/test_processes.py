"""The first process speaks for all."""

from __future__ import annotations

from lowrank_cnn.system.processes import first_process


def test_one_process_and_the_first_of_several_speak(monkeypatch):
    assert first_process()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert first_process() is (rank == "0")
