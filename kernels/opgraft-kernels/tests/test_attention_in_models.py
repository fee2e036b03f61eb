"""Attention as models write it: by matrix products and a softmax, and by PyTorch's own modules.

What reaches the overrides, in eager mode and in compiled graphs, and what PyTorch computes in ways
that call no op of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton")

import opgraft
from opgraft_kernels.attention import overrides

pytestmark = pytest.mark.filterwarnings("ignore")  # Inductor's and the encoder's own

BATCH, HEADS, LENGTH, DIM = 2, 2, 40, 16
EMBED = HEADS * DIM


class Hits(NamedTuple):
    forward: int
    backward: int


NONE, FORWARD, BOTH = Hits(0, 0), Hits(1, 0), Hits(1, 1)


@pytest.fixture
def hits(device: torch.device) -> Iterator[Callable[[], Hits]]:
    """The overrides at the device's key, and how often they ran."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    ours = overrides.register(device.type.upper())

    def count() -> Hits:
        backward = [each.hits for each in ours if each.op.endswith("_backward")]
        return Hits(sum(each.hits for each in ours) - sum(backward), sum(backward))

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield count
    torch._dynamo.reset()


def run(function: Callable[..., Tensor], *inputs: Tensor, trains: bool) -> list[Tensor]:
    """The output and, in training, the inputs' gradients."""
    leaves = [each.detach().requires_grad_(trains) for each in inputs]
    with torch.set_grad_enabled(trains):
        out = function(*leaves)
    if not trains:
        return [out]
    grad = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_as_native(
    function: Callable[..., Tensor], *inputs: Tensor, trains: bool, compiles: bool
) -> None:
    """What it computes here, once, is what it computes in eager mode without overrides."""
    called = torch.compile(function, fullgraph=True) if compiles else function
    ours = run(called, *inputs, trains=trains)
    with opgraft.disabled():
        native = run(function, *inputs, trains=trains)
    for one, other in zip(ours, native, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def half(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).half()


# ------------------------------------------------------------------ written out


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * DIM**-0.5, -1) @ v


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / 4.0, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the eager attention of transformers: what is hidden has a large negative number."""
    hidden = torch.ones(LENGTH, LENGTH, device=q.device, dtype=torch.bool).triu(1)
    mask = torch.zeros(LENGTH, LENGTH, device=q.device, dtype=q.dtype).masked_fill(hidden, -1e4)
    return (torch.matmul(q, k.transpose(-2, -1)) / 4.0 + mask).softmax(-1) @ v


def length_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.permute(0, 2, 1, 3) for each in (q, k, v))
    return torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / 4.0, -1) @ v


WRITTEN_OUT = {each.__name__: each for each in (scaled, divided, masked, length_before_heads)}


def written_out_inputs(name: str, device: torch.device) -> list[Tensor]:
    is_length_first = name == "length_before_heads"
    shape = (BATCH, LENGTH, HEADS, DIM) if is_length_first else (BATCH, HEADS, LENGTH, DIM)
    return [half(*shape, device=device) for _ in range(3)]


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_attention_that_is_written_out_hits_where_inductor_fuses_it(
    name: str, trains: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    inputs = written_out_inputs(name, device)
    assert_as_native(WRITTEN_OUT[name], *inputs, trains=trains, compiles=True)
    assert hits() == (BOTH if trains else FORWARD)


def test_attention_that_is_written_out_is_no_op_of_ours_in_eager_mode(
    device: torch.device, hits: Callable[[], Hits]
) -> None:
    run(scaled, *written_out_inputs("scaled", device), trains=True)
    assert hits() == NONE


# ------------------------------------------------------------------ masks that a model makes


def under_made_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models of transformers do where they are compiled: a boolean mask, causal and padding."""
    place = torch.arange(LENGTH, device=q.device)
    begins = torch.tensor([0, 9], device=q.device)[:, None, None, None]
    seen = (place <= place[:, None]) & ((place >= begins) | (place == place[:, None]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(BATCH, 1, LENGTH, LENGTH))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_attention_under_a_mask_that_the_model_makes_hits(
    trains: bool, compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    inputs = [half(BATCH, HEADS, LENGTH, DIM, device=device) for _ in range(3)]
    assert_as_native(under_made_mask, *inputs, trains=trains, compiles=compiles)
    assert hits() == (BOTH if trains else FORWARD)


# ------------------------------------------------------------------ PyTorch's modules

# Which keys of which sequence are padding, and which keys a query may not see.
MASKS = ["none", "padding", "causal", "padding and causal"]


def masks(name: str, device: torch.device, keys: int = LENGTH) -> dict[str, Tensor]:
    """As arguments of `nn.MultiheadAttention`. No query is left without a key."""
    given = {}
    if "padding" in name:
        padding = torch.arange(keys) >= torch.tensor([[keys], [keys - 9]])
        given["key_padding_mask"] = padding.to(device)
    if "causal" in name:
        hidden = torch.ones(LENGTH, keys, dtype=torch.bool, device=device)
        given["attn_mask"] = hidden.triu(1)
    return given


def multihead(device: torch.device) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    return module.to(device, torch.float16).requires_grad_(False)


def self_attention(module: nn.MultiheadAttention, **given: Any) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        out: Tensor = module(x, x, x, **{"need_weights": False, **given})[0]
        return out

    return attend


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MASKS)
def test_multihead_attention_hits_in_training(
    name: str, compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    attend = self_attention(multihead(device), **masks(name, device))
    x = half(BATCH, LENGTH, EMBED, device=device)
    assert_as_native(attend, x, trains=True, compiles=compiles)
    assert hits() == BOTH


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="where Dynamo takes the fast path, if so")
@pytest.mark.parametrize("name", ["none", "padding and causal"])
def test_multihead_attention_hits_in_compiled_inference(
    name: str, device: torch.device, hits: Callable[[], Hits]
) -> None:
    """The module does not take its fast path while Dynamo traces it."""
    attend = self_attention(multihead(device).eval(), **masks(name, device))
    x = half(BATCH, LENGTH, EMBED, device=device)
    assert_as_native(attend, x, trains=False, compiles=True)
    assert hits() == FORWARD


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_multihead_attention_that_returns_weights_does_not_reach_us(
    compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    """That is the module's default. It computes them by matrix products and a softmax."""
    attend = self_attention(multihead(device), need_weights=True)
    x = half(BATCH, LENGTH, EMBED, device=device)
    assert_as_native(attend, x, trains=True, compiles=compiles)
    assert hits() == NONE


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_cross_attention_by_the_functional_form_hits(
    compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    module, keys = multihead(device), 24
    given = masks("padding", device, keys)

    def attend(query: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = F.multi_head_attention_forward(
            *(query, memory, memory, EMBED, HEADS, module.in_proj_weight, module.in_proj_bias),
            *(None, None, False, 0.0, module.out_proj.weight, module.out_proj.bias),
            need_weights=False,
            **given,
        )[0]
        return out

    inputs = (half(size, BATCH, EMBED, device=device) for size in (LENGTH, keys))
    assert_as_native(attend, *inputs, trains=True, compiles=compiles)
    assert hits() == BOTH


def encoder_layer(device: torch.device) -> nn.TransformerEncoderLayer:
    module = nn.TransformerEncoderLayer(EMBED, HEADS, 2 * EMBED, 0.0, batch_first=True)
    return module.to(device, torch.float16).requires_grad_(False)


def encode(module: nn.Module, name: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    names = {"key_padding_mask": "src_key_padding_mask", "attn_mask": "src_mask"}
    given = {names[key]: each for key, each in masks(name, device).items()}

    def apply(x: Tensor) -> Tensor:
        out: Tensor = module(x, **given)
        return out

    return apply


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_an_encoder_layer_hits_in_training(
    compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    apply = encode(encoder_layer(device), "padding and causal", device)
    x = half(BATCH, LENGTH, EMBED, device=device)
    assert_as_native(apply, x, trains=True, compiles=compiles)
    assert hits() == BOTH


# ------------------------------------------------------------------ the fast path of inference

# `_native_multi_head_attention` and `_transformer_encoder_layer_fwd` are ops of their own. On CUDA
# they call `scaled_dot_product_attention` where there is no mask and FlashAttention-2 is chosen;
# where cuDNN is chosen it depends on torch. Else they multiply matrices around a softmax, as on CPU
# always.


@pytest.fixture
def without_the_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


# The fast path asks for a backend before it looks whether there is a mask. Flash takes none.
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def expected_of_the_fast_path(name: str, device: torch.device) -> Hits:
    return FORWARD if device.type == "cuda" and name == "none" else NONE


@pytest.mark.parametrize("name", ["none", "padding"])
def test_the_fast_path_of_multihead_attention(
    name: str, device: torch.device, hits: Callable[[], Hits]
) -> None:
    attend = self_attention(multihead(device).eval(), **masks(name, device))
    x = half(BATCH, LENGTH, EMBED, device=device)
    with sdpa_kernel(FLASH):
        assert_as_native(attend, x, trains=False, compiles=False)
    assert hits() == expected_of_the_fast_path(name, device)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["none", "padding"])
def test_the_fast_path_of_an_encoder_layer(
    name: str, compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    """In a compiled graph, too, a layer is one op, which Inductor calls. It has no meta function:
    on CUDA the compiler runs it once to learn what it returns."""
    apply = encode(encoder_layer(device).eval(), name, device)
    x = half(BATCH, LENGTH, EMBED, device=device)
    with sdpa_kernel(FLASH):
        assert_as_native(apply, x, trains=False, compiles=compiles)
    expected, found = expected_of_the_fast_path(name, device), hits()
    assert found == expected or (compiles and found == Hits(2 * expected.forward, 0))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("without_the_fast_path")
def test_an_encoder_layer_hits_in_inference_without_the_fast_path(
    compiles: bool, device: torch.device, hits: Callable[[], Hits]
) -> None:
    apply = encode(encoder_layer(device).eval(), "padding", device)
    x = half(BATCH, LENGTH, EMBED, device=device)
    assert_as_native(apply, x, trains=False, compiles=compiles)
    assert hits() == FORWARD


@pytest.mark.usefixtures("without_the_fast_path")
def test_multihead_attention_hits_in_inference_without_the_fast_path(
    device: torch.device, hits: Callable[[], Hits]
) -> None:
    attend = self_attention(multihead(device).eval(), **masks("padding", device))
    x = half(BATCH, LENGTH, EMBED, device=device)
    assert_as_native(attend, x, trains=False, compiles=False)
    assert hits() == FORWARD
