"""Faults planted on purpose: what `opgraft.verify` has to catch, and what it has to let pass.

`docs/trust.md` has the table of them, which `tests/verification/test_faults.py` keeps.
"""

from tests.verification.faults import calls, indices, memory, rights, shapes, values
from tests.verification.faults.registry import FAULTS, RIGHT, Planted

__all__ = ["FAULTS", "RIGHT", "Planted", "calls", "indices", "memory", "rights", "shapes", "values"]
