"""Overrides in compiled graphs and exported programs."""

from __future__ import annotations

from opgraft.pt2.exports import export_overrides

__all__ = ["NAMESPACE", "export_overrides"]

#: Of the ops that stand for overridden ones in graphs.
NAMESPACE = "opgraft"
