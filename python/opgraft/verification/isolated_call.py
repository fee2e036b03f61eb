"""The process that `isolated.run_in_new_process` starts: it makes the call that stdin describes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict

from opgraft import packs, verification
from opgraft.router import threads
from opgraft.verification.isolated import outcome_of
from opgraft.verification.samples import run
from opgraft.verification.single_override import past_the_contract


def main() -> None:
    given = json.load(sys.stdin)
    sys.path[:] = given["path"]
    if given["pack"] is not None:
        packs.load(given["pack"])
    elif given["module"] is not None:
        importlib.import_module(given["module"])
    keys = ("op", "dispatch_key", "name", "seed")
    found = verification.sample(given["sample"], **{key: given[key] for key in keys})
    call = found.call

    def work() -> None:
        if given["natively"]:
            with threads.scope(threads.EVERYTHING):
                run(call)
        else:
            with past_the_contract(found.override, [call]):
                run(call)

    outcome = json.dumps(asdict(outcome_of(work)))
    # Exit at once: an ordinary exit would wait for a lost device.
    os.write(1, outcome.encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
