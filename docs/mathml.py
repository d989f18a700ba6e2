"""A hook of mkdocs: formulas become MathML while the site is built, so that no script has to draw them.

In a page they are written as GitHub reads them, `$...$` in a line and a fence called `math` for a line of their
own. `pymdownx.arithmatex` marks them; here they are translated.
"""

from __future__ import annotations

import re
from html import unescape

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    """Called by mkdocs with the HTML of each page."""
    html = _BLOCK.sub(lambda found: f'<div class="formula">{_mathml(found[1], "block")}</div>', html)
    return _INLINE.sub(lambda found: _mathml(found[1], "inline"), html)


def _mathml(tex: str, display: str) -> str:
    return convert(unescape(tex).strip(), display=display)
