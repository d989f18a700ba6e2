"""A hook of mkdocs: examples in docstrings (`>>> ...` and their output) become blocks of code.

Markdown alone reads `>>>` as three nested quotations and joins the lines.
"""

from __future__ import annotations

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

PROMPTS = (">>>", "...")
FLAGS = re.compile(r"\s*# doctest:.*")
"""Directives for the test, which readers do not need."""


class Examples(Preprocessor):
    """Fence each example: from its first prompt to the next empty line."""

    def run(self, lines: list[str]) -> list[str]:
        found: list[str] = []
        inside = fenced = False
        for line in [*lines, ""]:
            text = line.strip()
            fenced ^= text.startswith("```")
            if not inside and not fenced and text.startswith(PROMPTS[0]):
                inside = True
                found += ["", "```pycon"]
            elif inside and not text:
                inside = False
                found.append("```")
            found.append(FLAGS.sub("", text) if inside and text.startswith(PROMPTS) else line)
        return found[:-1]


class ExamplesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802, the name that Markdown calls
        md.preprocessors.register(Examples(md), "doctests", 27)  # after white space, before fences


def on_config(config: Any, **_: object) -> Any:
    """Called by mkdocs before it builds."""
    config.markdown_extensions.append(ExamplesExtension())
    return config
