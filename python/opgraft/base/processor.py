"""Which processor this machine has."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def name() -> str:
    """The processor's model, or its architecture where the system does not tell the model."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else f"CPU {platform.processor() or platform.machine()}"
