"""How often the garbage collector of a process that runs tests looks for what nobody holds."""

from __future__ import annotations

import gc

#: Python's own is 700: what Dynamo and Triton's interpreter make reaches it all the time, and each
#: hundredth look may be one through all of torch's objects.
OBJECTS = 20_000


def collect_seldom() -> None:
    """Have it look after more objects. It still does, and a test that needs it to asks it to."""
    gc.set_threshold(OBJECTS)
