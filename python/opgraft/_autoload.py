"""What torch calls at the end of `import torch`: the entry point in its group `torch.backends`.

Nothing that can fail is imported here before the `try`: an exception would end the user's
`import torch`.
"""

from __future__ import annotations

import logging

from opgraft import env


def activate() -> None:
    """Activate the packs that are installed. Never raises; `OPGRAFT_DISABLE=1`: does nothing."""
    if env.installs_nothing():
        return
    try:
        from opgraft import packs

        packs.activate()
    except Exception as error:
        log = logging.getLogger("opgraft")
        log.warning("opgraft: packs are not activated: %s: %s", type(error).__name__, error)
        log.debug("packs are not activated", exc_info=error)
