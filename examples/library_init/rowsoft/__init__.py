"""A library that brings a faster softmax: `import rowsoft` is all that its users do.

From then on `torch.softmax`, and every model that calls it, runs the kernel in `kernels.py` for the
tensors that it is good at, and PyTorch's own for the rest.
"""

import os

import torch

from opgraft import triton_utils, when


def softmax(self, dim, half_to_float):
    """What `aten::_softmax` does, for the calls that the condition below lets through.

    The arguments are the op's, by position: torch.ops.aten._softmax.default._schema shows them.
    """
    # Here, and not at the top: importing the library must not import Triton.
    from rowsoft.kernels import row_softmax

    return row_softmax(self)


#: Kernels are for CUDA. With TRITON_INTERPRET=1 Triton runs them on the CPU, to try them out.
KEY = "CPU" if os.environ.get("TRITON_INTERPRET") == "1" else "CUDA"

override = triton_utils.register_op_override(
    "aten",
    "_softmax",  # what torch.softmax calls; opgraft.explain(torch.softmax, x, -1) tells
    KEY,
    softmax,
    # Metadata only: dtypes, sizes, strides. It is evaluated in C++, on every call.
    cond=when.dtype("self", torch.float32, torch.float16)
    & when.is_contiguous("self")
    & ((when.value("dim") == -1) | (when.value("dim") == when.ndim("self") - 1))
    & (when.size("self", -1) >= 1024)
    & (when.size("self", -1) <= 8192)
    & (when.numel("self") >= when.size("self", -1))  # not empty
    & (when.value("half_to_float") == False),  # noqa: E712
    name="rowsoft.softmax",
)
