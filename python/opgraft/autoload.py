"""The entry point in torch's group `torch.backends`, which torch calls at the end of its import.

Nothing that can fail is imported before the `try`: an exception would break the user's
`import torch`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from opgraft.base import env


def activate() -> None:
    """Activate the installed packs. Never raises; does nothing under `OPGRAFT_DISABLE=1`."""
    if env.installs_nothing():
        return
    try:
        with _garbage_collection_paused():
            from opgraft import packs

            packs.activate_or_defer()
    except Exception as error:
        log = logging.getLogger("opgraft")
        log.warning("opgraft: packs are not activated: %s: %s", type(error).__name__, error)
        log.debug("packs are not activated", exc_info=error)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector while modules are imported: modules are no garbage.

    It would also search everything that `import torch` has just created: a tenth of the time.
    """
    if not gc.isenabled():  # the user's own choice
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
