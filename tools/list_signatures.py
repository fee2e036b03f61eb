"""Writes csrc/signatures.h: the C++ signatures under which routers take calls without boxing them.

    python tools/list_signatures.py       # needs PyYAML, as torch's own generator does

It adds the signatures that the ops below have in the running torch to those in the file. The
signatures differ between versions of torch, so run it with each supported one. A signature costs
two kilobytes of code and a tenth of a second of compile time. So the list has only ops for which
somebody may write a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torchgen
from torchgen.api import cpp, dispatcher
from torchgen.context import native_function_manager
from torchgen.gen import parse_native_yaml
from torchgen.model import BackendIndex, DispatchKey, NativeFunction

HEADER = Path(__file__).resolve().parents[1] / "csrc" / "signatures.h"

#: Base names: each stands for its overloads and their in-place variants.
OPS = """
    abs neg exp log rsqrt sqrt reciprocal sin cos relu sigmoid tanh silu gelu elu leaky_relu
    hardtanh softplus log_sigmoid_forward glu threshold
    sigmoid_backward tanh_backward silu_backward gelu_backward elu_backward leaky_relu_backward
    hardtanh_backward softplus_backward log_sigmoid_backward glu_backward threshold_backward
    add sub mul div pow maximum minimum where clamp lerp addcmul addcdiv masked_fill eq lt
    logical_not
    sum mean prod amax amin aminmax max min argmax argmin any all var std var_mean norm
    linalg_vector_norm logsumexp cumsum cumprod
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    mm bmm addmm baddbmm addbmm addmv mv dot linear _addmm_activation _int_mm
    _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2
    _weight_int4pack_mm _weight_int8pack_mm _mixed_dtypes_linear
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _batch_norm_with_update
    batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    _fused_rms_norm _fused_rms_norm_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_fused_attention_overrideable_backward
    _flash_attention_forward _flash_attention_backward _efficient_attention_forward
    _efficient_attention_backward _cudnn_attention_forward _cudnn_attention_backward
    convolution convolution_backward cudnn_convolution cudnn_convolution_transpose
    mkldnn_convolution convolution_overrideable convolution_backward_overrideable
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d
    upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward grid_sampler_2d
    grid_sampler_2d_backward constant_pad_nd
    embedding embedding_dense_backward _embedding_bag _embedding_bag_forward_only
    index index_put _index_put_impl index_select index_add gather scatter scatter_add scatter_reduce
    nonzero topk sort kthvalue roll flip tril triu cat copy clone fill zero _to_copy
    native_dropout native_dropout_backward
    nll_loss_forward nll_loss_backward mse_loss mse_loss_backward smooth_l1_loss huber_loss
    huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
    _foreach_add _foreach_mul _foreach_addcmul _foreach_addcdiv _foreach_lerp _foreach_norm
    _foreach_sqrt _foreach_copy _foreach_zero _amp_foreach_non_finite_check_and_unscale
    _fused_adam _fused_adamw _fused_sgd _fused_adagrad
    _thnn_fused_lstm_cell _thnn_fused_gru_cell
"""

#: Those whose `out=` variants are called too: compiled code calls matrix products so.
WITH_OUT = "mm bmm addmm baddbmm addmv _scaled_mm _int_mm abs mul add sum mean cat"

KEYS = (DispatchKey.CPU, DispatchKey.CUDA)
UNSUPPORTED = ("Dimname", "Storage", "Stream")
LIST = re.compile(r"^    (?P<signature>.+?),?  // (?P<op>\S+)$", re.MULTILINE)

TEXT = """\
// The C++ signatures of native kernels under which routers take calls without boxing them, each
// with an op that has it in some torch. Written by tools/list_signatures.py.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace opgraft {{

template <class... Listed>
struct Signatures {{}};

using ListedSignatures = Signatures<
{lines}>;

}}  // namespace opgraft
"""


def main() -> None:
    """The command."""
    listed = {}
    if HEADER.is_file():
        listed = {m["signature"]: m["op"] for m in LIST.finditer(HEADER.read_text())}
    before = len(listed)
    for op, signature in signatures():
        listed.setdefault(signature, op)
    HEADER.write_text(TEXT.format(lines=written(listed.items())))
    print(f"{HEADER}: {before} signatures, now {len(listed)}")


def written(listed: Iterable[tuple[str, str]]) -> str:
    """The list's lines; the last one has no comma."""
    ordered = sorted(listed)
    lines = [f"    {signature},  // {op}" for signature, op in ordered[:-1]]
    lines += [f"    {signature}  // {op}\n    " for signature, op in ordered[-1:]]
    return "\n".join(lines)


def signatures() -> Iterator[tuple[str, str]]:
    """Each of the ops' overloads with each signature that a kernel of it has."""
    native = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(native / "native_functions.yaml"), str(native / "tags.yaml"))
    wanted, with_out = set(OPS.split()), set(WITH_OUT.split())
    for function in parsed.native_functions:
        base = function.func.name.name.base
        if base not in wanted or (function.func.is_out_fn() and base not in with_out):
            continue
        with native_function_manager(function):
            for key in KEYS:
                if (signature := _signature(function, parsed.backend_indices[key])) is not None:
                    yield str(function.func.name), signature


def _signature(function: NativeFunction, index: BackendIndex) -> str | None:
    """Of the kernel at the key; None where there is none, or a type that no router takes."""
    kernel = index.get_kernel(function)
    structured = function.structured or function.structured_delegate is not None
    if kernel is None and not structured and not function.has_composite_kernel:
        return None
    # As torch's own generator has it: it wraps every other kernel to take symbolic sizes.
    symbolic = not structured
    arguments = dispatcher.arguments(function.func, symint=symbolic)
    result = cpp.returns_type(function.func.returns, symint=symbolic).cpp_type()
    types = [argument.nctype.type.cpp_type() for argument in arguments]
    text = f"{result}({', '.join(types)})"
    return None if any(name in text for name in UNSUPPORTED) else _spaced(text)


def _spaced(text: str) -> str:
    text = text.replace("::std::", "std::").replace(" &", "&")
    text = text.replace("c10::string_view", "std::string_view")
    return re.sub(r",(?=\S)", ", ", text)


if __name__ == "__main__":
    main()
