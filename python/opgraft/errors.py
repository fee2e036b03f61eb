"""What opgraft raises and warns with.

Every message names the override or the op, the argument that is at fault and what to do about it.
"""

from __future__ import annotations


class OpgraftError(Exception):
    """Base of every error that opgraft itself raises."""


class RegistrationError(OpgraftError, ValueError):
    """`register_op_override` or a control call was given something that cannot work."""


class ContractError(OpgraftError, RuntimeError):
    """An override returned something that the native kernel would never have returned."""


class OverrideWarning(UserWarning):
    """An override failed, the native kernel ran instead, and the program goes on."""
