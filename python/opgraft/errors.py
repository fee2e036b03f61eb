"""opgraft's exceptions and warnings.

Every message names the override or the op, the argument at fault, and what to do about it.
"""

from __future__ import annotations

import os
import sys
import warnings


class OpgraftError(Exception):
    """Base of every error that opgraft itself raises."""


class RegistrationError(OpgraftError, ValueError):
    """`register_op_override` or a control call was given something that cannot work."""


class ContractError(OpgraftError, RuntimeError):
    """An override returned something that the native kernel would never have returned."""


class OverrideWarning(UserWarning):
    """An override failed, the native kernel ran instead, and the program goes on."""


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn_caller(message: str) -> None:
    """Warn with an :class:`OverrideWarning` that points at the line of the user's own call.

    The frames of opgraft, of torch and of the standard library's context managers are skipped.
    """
    frame, level = sys._getframe(1), 2
    torch_folder = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or _HERE)
    inside = (_HERE, torch_folder + os.sep, os.path.dirname(os.__file__) + os.sep + "contextlib")
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, OverrideWarning, stacklevel=level)
