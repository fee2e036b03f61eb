"""A program that uses the library: it imports it, and goes on calling PyTorch.

python examples/library_init/main.py                        # with a GPU
TRITON_INTERPRET=1 python examples/library_init/main.py     # without one
"""

import rowsoft
import torch

import opgraft

device = "cuda" if rowsoft.KEY == "CUDA" else "cpu"
if device == "cuda" and not torch.cuda.is_available():
    raise SystemExit("There is no GPU here: set TRITON_INTERPRET=1 to run the kernel on the CPU.")

wide = torch.randn(4, 2000, device=device)
narrow = torch.randn(4, 10, device=device)

with opgraft.trace() as t:
    for x in (wide, narrow):
        y = torch.softmax(x, -1)
        torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), atol=1e-6, rtol=1e-5)

print(t)  # one call taken; the narrow one and the two in float64 declined, and why
