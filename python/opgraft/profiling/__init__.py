"""Profiling: for each op its time, its bytes and flops, who took it, and the device's limit."""

from __future__ import annotations

from opgraft.profiling.session import Profile, profile

__all__ = ["Profile", "profile"]
