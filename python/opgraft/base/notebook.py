"""How what prints as text is shown in a notebook."""

from __future__ import annotations


class Shown:
    """What `str` says is what a prompt and a notebook show."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"
