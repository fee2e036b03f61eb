"""The crossover tables of this process: what is in force, and whether all ranks have the same.

See docs/tuning.md.
"""

from opgraft.tuning.agreement import digest, require_same

__all__ = ["digest", "require_same"]
