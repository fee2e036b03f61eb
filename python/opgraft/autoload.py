"""What torch calls at the end of `import torch`: the entry point in its group `torch.backends`.

Nothing that can fail is imported here before the `try`: an exception would end the user's
`import torch`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from opgraft.base import env


def activate() -> None:
    """Activate the packs that are installed. Never raises; `OPGRAFT_DISABLE=1`: does nothing."""
    if env.installs_nothing():
        return
    try:
        with _no_collections():
            from opgraft import packs

            packs.activate_or_defer()
    except Exception as error:
        log = logging.getLogger("opgraft")
        log.warning("opgraft: packs are not activated: %s: %s", type(error).__name__, error)
        log.debug("packs are not activated", exc_info=error)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python from looking for garbage while modules are imported, which stay.

    It would look through what `import torch` has just made, too: a tenth of the time.
    """
    if not gc.isenabled():  # the user's own choice
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
