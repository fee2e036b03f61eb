"""Python's garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector while much is made that stays: modules, overrides, tables.

    It would also search everything that `import torch` has created.

    On other threads than the main one it goes on: the program may switch it off meanwhile, for
    good, and the end of the pause would switch it on again.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not gc.isenabled():  # the latter is the user's own choice
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # the user's own, which must stay frozen
            # Together they put all objects into the oldest generation: the next collection, which
            # follows at once, does not search what stays.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
