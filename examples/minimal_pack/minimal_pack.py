"""The smallest kernel pack: `F.silu` in Triton, for large contiguous tensors.

    pip install examples/minimal_pack
    TRITON_INTERPRET=1 opgraft explain aten::silu --shape 64x64

`import torch` calls :func:`register`, because pyproject.toml names it as an entry point in the
group `opgraft.packs`.
"""


def register():
    # Inside, as these import torch: see "What runs when" in docs/packs.md.
    import torch

    from opgraft import triton_utils, when

    interpreted = triton_utils.interpreted()
    triton_utils.register_op_override(
        "aten",
        "silu",
        "CPU" if interpreted else "CUDA",
        silu,
        cond=when.dtype("self", torch.float32, torch.float16)
        & when.is_contiguous("self")
        & (when.numel("self") >= (2**10 if interpreted else 2**24)),
        name="minimal_pack.silu",
    )


def silu(self):
    from minimal_pack_kernels import silu  # imports Triton, at the first call

    return silu(self)
