"""opgraft grafts kernels written in a DSL (Triton, CuteDSL) onto PyTorch's own operators.

```python
from opgraft import triton_utils, when

triton_utils.register_op_override("aten", "_fused_rms_norm", "CUDA", impl, cond=...)
```

From then on `F.rms_norm` runs `impl` where the condition holds and PyTorch's own kernel elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from opgraft.base import env

if TYPE_CHECKING:
    __version__: str

    from opgraft import cutedsl_utils, packs, pt2, triton_utils, tuning, when
    from opgraft.control import disable, disabled, enable, native, overrides
    from opgraft.crossover import Crossover
    from opgraft.errors import ContractError, OpgraftError, OverrideWarning, RegistrationError
    from opgraft.explanation import Explanation, explain
    from opgraft.explanation.trace import Trace, trace
    from opgraft.ops.lazy_impl import lazy
    from opgraft.plan.warm import warmup
    from opgraft.profiling import Profile, profile
    from opgraft.ready.readiness import wait_until_ready, when_not_ready
    from opgraft.registration import register_op_override
    from opgraft.registry import Override
    from opgraft.router.backward_op import register_backward
    from opgraft.router.shadow import shadow
    from opgraft.verification import verify

__all__ = [
    "ContractError",
    "Crossover",
    "Explanation",
    "OpgraftError",
    "Override",
    "OverrideWarning",
    "Profile",
    "RegistrationError",
    "Trace",
    "cutedsl_utils",
    "disable",
    "disabled",
    "enable",
    "explain",
    "lazy",
    "native",
    "overrides",
    "packs",
    "profile",
    "pt2",
    "register_backward",
    "register_op_override",
    "shadow",
    "trace",
    "triton_utils",
    "tuning",
    "verify",
    "wait_until_ready",
    "warmup",
    "when",
    "when_not_ready",
]

# The module of each public name; a name that is not here is itself a module. `import torch` imports
# this file wherever a pack is installed, so names are imported only when a program uses them.
_MODULES_OF_NAMES = {
    "ContractError": "errors",
    "Crossover": "crossover",
    "Explanation": "explanation",
    "OpgraftError": "errors",
    "Override": "registry",
    "OverrideWarning": "errors",
    "Profile": "profiling",
    "RegistrationError": "errors",
    "Trace": "explanation.trace",
    "disable": "control",
    "disabled": "control",
    "enable": "control",
    "explain": "explanation",
    "lazy": "ops.lazy_impl",
    "native": "control",
    "overrides": "control",
    "profile": "profiling",
    "register_backward": "router.backward_op",
    "register_op_override": "registration",
    "shadow": "router.shadow",
    "trace": "explanation.trace",
    "verify": "verification",
    "wait_until_ready": "ready.readiness",
    "warmup": "plan.warm",
    "when_not_ready": "ready.readiness",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from opgraft.base import distributions

        return distributions.version("opgraft") or "unknown"
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES_OF_NAMES.get(name, name)}")
    value = getattr(module, name) if name in _MODULES_OF_NAMES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


@cache
def _import_torch() -> None:
    importlib.import_module("torch")
    importlib.import_module("opgraft.pt2.namespace").define_on_lookup()
    if env.has_any():
        from opgraft import spelling

        spelling.check_environment()


def _initialise() -> None:
    env.configure_logging()
    # The `opgraft` command imports torch when one of its commands needs it.
    if "opgraft_command" not in sys.modules and not _is_run_as_module():
        _import_torch()


def _is_run_as_module() -> bool:
    """Whether this is imported to find what `python -m opgraft` runs."""
    # Until the module is found it is "-m" and the module's arguments, which end the whole line.
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("opgraft", "-mopgraft")


# This comes last: torch activates packs at the end of its own import, and packs import opgraft.
# They must find it complete, whichever of the two a program imports first.
_initialise()
