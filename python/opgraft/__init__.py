"""opgraft grafts kernels written in a DSL (Triton, CuteDSL) onto PyTorch's own operators.

```python
from opgraft import triton_utils, when

triton_utils.register_op_override("aten", "_fused_rms_norm", "CUDA", impl, cond=...)
```

From then on `F.rms_norm` runs `impl` where the condition holds and PyTorch's own kernel elsewhere.
"""

from __future__ import annotations

from opgraft import cutedsl_utils, env, packs, triton_utils, when
from opgraft.control import disable, disabled, enable, native, overrides
from opgraft.errors import ContractError, OpgraftError, OverrideWarning, RegistrationError
from opgraft.explanation import Explanation, explain
from opgraft.registration import register_op_override
from opgraft.registry import Override

__all__ = [
    "ContractError",
    "Explanation",
    "OpgraftError",
    "Override",
    "OverrideWarning",
    "RegistrationError",
    "cutedsl_utils",
    "disable",
    "disabled",
    "enable",
    "explain",
    "native",
    "overrides",
    "packs",
    "register_op_override",
    "triton_utils",
    "when",
]

env.configure_logging()
