"""A hook of mkdocs: the page for addresses that do not exist works from the disk, as all others do.

Mkdocs makes it for a server's root. All pages are in one folder, and find each other there by name.
"""

from __future__ import annotations

import re
from typing import Any

ROOTS = ('"base": "/"', '"base": "."'), ('"/."', '"index.html"')
ADDRESS = re.compile(r'(?<=")/(?=[\w.])')


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Called by mkdocs for each page that no Markdown file makes."""
    if template_name != "404.html":
        return output_content
    for rooted, beside in ROOTS:
        output_content = output_content.replace(rooted, beside)
    return ADDRESS.sub("", output_content)
