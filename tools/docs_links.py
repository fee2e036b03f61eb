"""A hook of mkdocs for links from pages to files outside of docs/.

The pages are also read in the repository, where a link to `../benchmarks/attention.py` works. In
the site, linked pictures are copied, and links to other files become their paths as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_OUTWARD = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\(\.\./(?P<path>[^)#]+)[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """The site's files, with the pictures that pages show from elsewhere."""
    for page in files.documentation_pages():
        for link in _OUTWARD.finditer(page.content_string):
            if link["image"]:
                source = str(ROOT / link["path"])
                files.append(File.generated(config, _place(link["path"]), abs_src_path=source))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with its links out of docs/ turned into what the site has."""

    def turned(link: re.Match[str]) -> str:
        if link["image"]:
            return f"![{link['text']}]({_place(link['path'])})"
        return f"{link['text']} (`{link['path']}`)"

    return _OUTWARD.sub(turned, markdown)


def _place(path: str) -> str:
    return f"pictures/{Path(path).name}"
