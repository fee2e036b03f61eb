"""Objects that a notebook shows as their text."""

from __future__ import annotations


class TextDisplay:
    """A prompt and a notebook show an object as `str` prints it."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"
