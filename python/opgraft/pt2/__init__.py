"""Overrides in compiled graphs and exported programs."""

from __future__ import annotations

from opgraft.pt2.exports import export_overrides

__all__ = ["NAMESPACE", "export_overrides"]

#: The namespace of the ops that replace overridden ops in graphs.
NAMESPACE = "opgraft"
