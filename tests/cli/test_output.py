"""Streams that outlive their readers."""

from __future__ import annotations

import errno
import io
import sys
import warnings

import pytest

from lowrank_cnn.cli.app import LastingStream, lasting_output, plain_warnings
from lowrank_cnn.core.errors import LowRankWarning


class Broken(io.StringIO):
    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def write(self, _: str) -> int:
        raise OSError(self.code, "broken")


def test_a_closed_pipe_is_no_error():
    stream = LastingStream(Broken(errno.EPIPE))
    assert stream.write("abc") == 3
    stream.flush()
    assert stream.error is None


def test_a_full_disk_is_remembered_and_the_rest_dropped():
    stream = LastingStream(Broken(errno.ENOSPC))
    assert [stream.write("abc"), stream.write("d")] == [3, 1]
    assert stream.error is not None
    assert stream.error.errno == errno.ENOSPC


def test_the_streams_are_put_back(capsys):
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("shown")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "shown\n"


def test_our_own_warnings_are_printed_once_and_without_a_place(capsys: pytest.CaptureFixture[str]):
    with plain_warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("val is not used.", LowRankWarning, stacklevel=1)
    assert capsys.readouterr().err == "val is not used.\n"
