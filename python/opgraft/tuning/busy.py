"""Whether a device is fit to measure on: nobody else uses it, and it does not throttle."""

from __future__ import annotations

import subprocess

import torch

#: Percent of the time in which another program's kernels run, from which on times are not trusted.
_MOST_UTILIZATION = 5
_SECONDS = 20


def why_unfit(device: torch.device) -> str | None:
    """Why times on a device cannot be trusted now; None if nothing speaks against it.

    To be asked before this process uses the device. It asks `nvidia-smi`; without it nothing is
    known, which does not speak against the device.
    """
    if device.type != "cuda":
        return None
    fields = ["utilization.gpu", "clocks_event_reasons.hw_slowdown"]
    fields += ["clocks_event_reasons.sw_thermal_slowdown"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        done = subprocess.run(
            [*command, f"--id=GPU-{uuid}"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _reason(done.stdout)


def _reason(answer: str) -> str | None:
    """What an answer of `nvidia-smi` says against measuring.

    >>> _reason("0, Not Active, Not Active"), _reason("97, Not Active, Not Active")
    (None, 'another program uses it: 97 % of the time')
    >>> _reason("0, Active, Not Active")
    'it throttles: its clock is lowered'
    >>> _reason("[N/A], [N/A], [N/A]")
    """
    utilization, *slowdowns = [each.strip() for each in answer.strip().split(",")]
    if utilization.isdigit() and int(utilization) > _MOST_UTILIZATION:
        return f"another program uses it: {utilization} % of the time"
    if "Active" in slowdowns:
        return "it throttles: its clock is lowered"
    return None
