"""Record a command in a terminal as an animated picture: README shows the demo.

    python docs/recording.py docs/images/demo.svg make demo

The command runs in a folder of its own, with links to the files of the clone. Long pauses are shortened so that
the animation takes 20 seconds. Each line of the terminal is a text that is shown for its time; a viewer without
animations shows the end.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 80, 27
SECONDS, END = 20.0, 6.0
"""Of the animation, and of its last frame."""
CHARACTER, LINE, FONT, EDGE = 7.9, 18, 13, 14
"""Pixels."""
TOKEN = re.compile(r"\x1b\[(?P<number>\d*)[\d;?]*(?P<code>[A-Za-z])|(?P<text>[^\x1b\r\n]+)|(?P<move>[\r\n])|\x1b")

Frame = tuple[float, list[str]]
"""The seconds since the start, and the lines of the terminal."""


def record(command: Sequence[str]) -> Iterator[tuple[float, str]]:
    """What a command writes to a terminal, with the seconds since its start."""
    start, decoder = time.monotonic(), codecs.getincrementaldecoder("utf-8")("replace")
    with tempfile.TemporaryDirectory() as folder:
        for linked in (path for path in ROOT.iterdir() if path.name != "runs"):
            Path(folder, linked.name).symlink_to(linked)
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(folder)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.execvp(command[0], [*command])
        while written := _read(terminal):
            yield time.monotonic() - start, decoder.decode(written)
        os.waitpid(process, 0)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux's end of a terminal
        return b""


def frames(events: Iterator[tuple[float, str]], prompt: str) -> Iterator[Frame]:
    """The terminal after each event: text, new lines, returns, erased lines, steps upwards; no styles."""
    lines, row, column = [prompt, ""], 1, 0
    yield 0.0, [*lines]
    for seconds, text in events:
        for token in TOKEN.finditer(text):
            if token["move"]:
                row, column = (row + 1, column) if token["move"] == "\n" else (row, 0)
            elif token["code"] == "A":
                row -= int(token["number"] or 1)
            elif token["code"] == "K":
                lines[row] = "" if token["number"] == "2" else lines[row][:column]
            for character in token["text"] or "":
                row, column = (row + 1, 0) if column == COLUMNS else (row, column)
                lines += [""] * (row + 1 - len(lines))
                lines[row] = f"{lines[row]:<{column}}"[:column] + character + lines[row][column + 1 :]
                column += 1
            lines += [""] * (row + 1 - len(lines))
        yield seconds, [line.rstrip() for line in lines[-ROWS:]]


def shortened(found: Sequence[Frame]) -> list[Frame]:
    """The same frames with no pause longer than lets them take `SECONDS` with the last one."""
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(found)]
    longest, left = 0.0, SECONDS - END
    for place, pause in enumerate(sorted(pauses)):
        longest = left / (len(pauses) - place)
        if pause > longest:
            break
        left -= pause
    times = [0.0]
    for pause in pauses:
        times.append(times[-1] + min(pause, longest))
    return [(seconds, lines) for seconds, (_, lines) in zip(times, found, strict=True)]


def drawn(found: Sequence[Frame], title: str) -> str:
    """Every line of the terminal as a text for as long as it stays the same."""
    rows = max(len(lines) for _, lines in found)
    width, height = COLUMNS * CHARACTER + 2 * EDGE, rows * LINE + 2 * EDGE
    texts = []
    for row in range(rows):
        changes = [(0.0, "")]
        for seconds, lines in found:
            line = lines[row] if row < len(lines) else ""
            if line != changes[-1][1]:
                changes.append((seconds, line))
        for (start, line), (stop, _) in pairwise([*changes, (SECONDS, "")]):
            if line and start < stop:
                texts.append(_text(row, line, start / SECONDS, stop / SECONDS))
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>\n'
        f"<style>text{{font:{FONT}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;"
        "fill:#e6edf3;white-space:pre}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#161b22"/>\n{"".join(texts)}</svg>\n'
    )


def _text(row: int, line: str, start: float, stop: float) -> str:
    """A line of text that is seen from one share of the time to another."""
    where = f'x="{EDGE}" y="{EDGE + FONT + row * LINE}" textLength="{len(line) * CHARACTER:.1f}"'
    if start == 0 and stop == 1:
        return f"<text {where}>{escape(line)}</text>\n"
    shown = {0.0: 0, start: 1} | ({stop: 0} if stop < 1 else {})
    times, values = (";".join(f"{value:.4g}" for value in one) for one in (shown, shown.values()))
    moves = f'dur="{SECONDS:g}s" calcMode="discrete" repeatCount="indefinite"'
    animation = f'<animate attributeName="opacity" values="{values}" keyTimes="{times}" {moves}/>'
    return f'<text opacity="{int(stop == 1)}" {where}>{escape(line)}{animation}</text>\n'


def main() -> None:
    out, *command = sys.argv[1:]
    title = shlex.join(command)
    Path(out).write_text(drawn(shortened(list(frames(record(command), f"$ {title}"))), title))


if __name__ == "__main__":
    main()
