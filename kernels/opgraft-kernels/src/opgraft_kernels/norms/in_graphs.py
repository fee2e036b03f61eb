"""Which norms are opaque in compiled graphs: the ``compile=`` of RMSNorm and LayerNorm.

Inductor fuses a norm with the addition of the residual before it, as norms stand in models, and the
backward with the addition of the two gradients; an opaque op cannot be fused. So a norm is opaque
where it is faster beside such an addition. The GPU's time of an opaque norm over Inductor's, in
bfloat16 on an H200 (``benchmarks/compiled_norms.py``), by elements:

                    RMSNorm                           LayerNorm
    hidden  2**15   20   22   25   27      2**15   20   22   25   27
    forward, in inference
      1024   1.84 1.75 1.48 1.27 1.24       1.81 1.44 1.37 1.26 1.23
      2048   1.55 1.69 1.33 1.18 1.16       1.36 1.32 1.05 1.17 1.16
      4096   1.43 1.62 1.44 1.19 1.19       1.31 1.27 1.16 1.18 1.15
      8192   1.19 1.39 1.45 1.21 1.19       1.19 1.38 1.22 1.20 1.17
     16384   0.79 0.86 0.82 1.20 1.17       0.84 0.80 0.93 1.06 1.16
     32768   0.96 0.97 1.02 1.24 1.17       1.09 0.79 0.92 1.13 1.17
     65536   0.75 0.85 0.99 0.93 0.92       0.77 0.77 0.95 0.95 0.93
    forward and backward, in training, the backward alone opaque
      1024   1.49 0.90 0.88 1.12 1.14       1.69 0.86 0.82 1.04 1.12
      2048   1.27 0.85 0.85 1.12 1.16       1.25 0.83 0.73 1.04 1.12
      4096   1.24 0.91 0.85 1.05 1.11       1.28 0.88 0.78 0.93 1.06
      8192   1.34 1.20 0.96 0.92 1.08       1.37 1.25 0.89 0.81 1.03
     16384   1.10 1.14 1.10 0.94 0.96       1.07 1.15 1.11 0.95 0.89
     32768   1.36 1.21 1.10 0.86 0.85       1.25 1.10 1.04 0.84 0.82
     65536   1.41 1.26 1.10 0.79 0.82       1.37 1.23 1.03 0.83 0.84
    forward and backward, in training, both opaque
     65536   1.28 1.19 1.06 0.76 0.79       1.27 1.17 0.98 0.81 0.81

Under 2**15 in rows of 65536 stands one row. Where the forward of few wide rows is opaque, a loop of
calls takes less, too: 62 to 73 us against 67 to 82 for a row of 65536 and two of 16384, and 63 and
66 against 70 and 78 where the GPU takes 1.02 and 1.09 times as long. Of backwards of up to 2**22
elements a loop takes what the host takes, 270 to 700 us with autograd's engine: 0.84 to 1.05 of
Inductor's. Of 2**25 elements it waits for the host as well, and took 0.85 to 1.28 of Inductor's
(RMSNorm of 16384: 415 us against 325, of which the GPU 181 and 192), as did a forward of LayerNorm
in rows of 65536 (104 us against 96). A model whose norms are as large waits for the GPU: its time
decides here. In training, forwards of few wide rows were measured beside opaque backwards only,
where they save 0.04 to 0.13 in rows of 16384 and 65536; what decided is inference.

Rows shorter than 1024 and widths between two that differ have not been measured, and are
Inductor's; rows longer than 65536 are taken for as long, other dtypes for bfloat16.
"""

from __future__ import annotations

from typing import Any

from opgraft import when

__all__ = ["backward", "forward"]


def forward() -> Any:
    """Forwards that are opaque: of wide rows, few of them, or very wide ones."""
    hidden, elements = when.size("input", -1), when.numel("input")
    return (hidden >= 65536) | ((hidden >= 16384) & (elements <= 2**22))


def backward(many_from: int) -> Any:
    """Backwards that are opaque: of narrow rows, some of them, or of wide rows, many of them.

    Args:
        many_from: the width from which, up to 8192, backwards of 2**22 to 2**25 elements are.
    """
    hidden, elements = when.size("input", -1), when.numel("input")
    narrow = (hidden >= 1024) & (hidden <= 4096) & (elements >= 2**20) & (elements <= 2**22)
    many = (hidden >= many_from) & (hidden <= 8192) & (elements >= 2**22) & (elements <= 2**25)
    wide = (hidden >= 16384) & (elements >= 2**25)
    return narrow | many | wide
