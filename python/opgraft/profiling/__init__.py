"""Profiling: for each op its time, what it has to do, who took it, and the device's limit."""

from __future__ import annotations

from opgraft.profiling.session import Profile, profile

__all__ = ["Profile", "profile"]
