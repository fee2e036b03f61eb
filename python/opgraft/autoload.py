"""The entry point in torch's group `torch.backends`, which torch calls at the end of its import.

Nothing that can fail is imported before the `try`: an exception would break the user's
`import torch`.
"""

from __future__ import annotations

import logging

from opgraft.base import env, garbage


def activate() -> None:
    """Activate the installed packs. Never raises; does nothing under `OPGRAFT_DISABLE=1`."""
    if env.installs_nothing():
        return
    try:
        with garbage.collection_paused():
            from opgraft import packs

            packs.activate_or_defer()
    except Exception as error:
        log = logging.getLogger("opgraft")
        log.warning("opgraft: packs are not activated: %s: %s", type(error).__name__, error)
        log.debug("packs are not activated", exc_info=error)
