"""An override that decides for itself, instead of by a condition.

Registered without `cond=`, an impl gets the `torch.DispatchKeySet` first and sees every call.
Calling the same op inside it reaches PyTorch's own kernel, without recursion. A condition is
cheaper, because it runs in C++ and without the GIL. Use this form for what a condition cannot
express.

    python examples/smart_rms_norm.py                        # with a GPU
    TRITON_INTERPRET=1 python examples/smart_rms_norm.py     # without one
"""

import os

import torch
import torch.nn.functional as F

import opgraft
from opgraft import triton_utils


def _smart_rms_norm(dispatch_keys, input, normalized_shape, weight, eps):
    rows = input.numel() // max(1, input.shape[-1])
    if rows < 64 or len(normalized_shape) != 1 or not input.is_contiguous():
        return torch.ops.aten._fused_rms_norm.default(input, normalized_shape, weight, eps)
    # Imports Triton, at the first call that gets here.
    from rms_norm_triton import rms_norm

    return rms_norm(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)


KEY = "CPU" if os.environ.get("TRITON_INTERPRET") == "1" else "CUDA"

override = triton_utils.register_op_override(
    "aten", "_fused_rms_norm", KEY, _smart_rms_norm, unconditional_override=False
)


def main() -> None:
    device = KEY.lower()
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: set TRITON_INTERPRET=1 to use the CPU.")
    weight = torch.rand(256, device=device)
    with torch.no_grad(), opgraft.trace() as t:
        for rows in (8, 512):
            x = torch.randn(rows, 256, device=device)
            mine = F.rms_norm(x, (256,), weight)
            native = opgraft.native("aten::_fused_rms_norm")(x, [256], weight, None)[0]
            torch.testing.assert_close(mine, native, atol=1e-5, rtol=1e-5)
    print(t)
    # Both calls were hits; the small one handed on what the native kernel returned.
    print(f"hits {override.hits}, of these to the native kernel {override.fallbacks}")


if __name__ == "__main__":
    main()
