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

namespace opgraft {

template <class... Listed>
struct Signatures {};

using ListedSignatures = Signatures<
    at::Tensor&(at::Tensor&),                                        // abs_
    at::Tensor&(at::Tensor&, const at::Scalar&),                     // div_.Scalar
    at::Tensor&(at::Tensor&, const at::Scalar&, const at::Scalar&),  // add_.Scalar
    at::Tensor&(at::Tensor&, const at::Scalar&, const at::Scalar&, const at::Scalar&),  // elu_
    at::Tensor&(at::Tensor&, const at::Scalar&,
                std::optional<std::string_view>),                    // div_.Scalar_mode
    at::Tensor&(at::Tensor&, const at::Tensor&),                     // div_.Tensor
    at::Tensor&(at::Tensor&, const at::Tensor&, bool),               // copy_
    at::Tensor&(at::Tensor&, const at::Tensor&, const at::Scalar&),  // add_.Tensor
    at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&),  // masked_fill_.Tensor
    at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Scalar&),  // addcmul_
    at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Scalar&,
                const at::Scalar&),  // addmv_
    at::Tensor&(at::Tensor&, const at::Tensor&,
                std::optional<std::string_view>),  // div_.Tensor_mode
    at::Tensor&(at::Tensor&, const c10::List<std::optional<at::Tensor>>&, const at::Tensor&,
                bool),  // index_put_
    at::Tensor&(at::Tensor&, const c10::List<std::optional<at::Tensor>>&, const at::Tensor&, bool,
                bool),  // _index_put_impl_
    at::Tensor&(at::Tensor&, const std::optional<at::Scalar>&,
                const std::optional<at::Scalar>&),  // clamp_
    at::Tensor&(at::Tensor&, const std::optional<at::Tensor>&,
                const std::optional<at::Tensor>&),                            // clamp_.Tensor
    at::Tensor&(at::Tensor&, int64_t),                                        // tril_
    at::Tensor&(at::Tensor&, int64_t, const at::Tensor&, const at::Scalar&),  // scatter_.value
    at::Tensor&(at::Tensor&, int64_t, const at::Tensor&, const at::Scalar&,
                std::string_view),  // scatter_.value_reduce
    at::Tensor&(at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&),  // scatter_.src
    at::Tensor&(at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
                const at::Scalar&),  // index_add_
    at::Tensor&(at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
                std::string_view),  // scatter_.reduce
    at::Tensor&(at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&, std::string_view,
                bool),                                                 // scatter_reduce_.two
    at::Tensor&(at::Tensor&, int64_t, std::optional<at::ScalarType>),  // cumprod_
    at::Tensor&(at::Tensor&, std::string_view),                        // gelu_
    at::Tensor&(const at::ITensorListRef&, int64_t, at::Tensor&),      // cat.out
    at::Tensor&(const at::Tensor&, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>,
                at::Tensor&),                                        // mean.out
    at::Tensor&(const at::Tensor&, at::Tensor&),                     // abs.out
    at::Tensor&(const at::Tensor&, const at::Scalar&, at::Tensor&),  // mul.Scalar_out
    at::Tensor&(const at::Tensor&, const at::Scalar&, const at::Scalar&,
                at::Tensor&),  // add.Scalar_out
    at::Tensor&(const at::Tensor&, const at::Tensor&, at::ScalarType,
                at::Tensor&),                                        // bmm.dtype_out
    at::Tensor&(const at::Tensor&, const at::Tensor&, at::Tensor&),  // bmm.out
    at::Tensor&(const at::Tensor&, const at::Tensor&, const at::Scalar&, at::Tensor&),  // add.out
    at::Tensor&(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ScalarType,
                const at::Scalar&, const at::Scalar&, at::Tensor&),  // baddbmm.dtype_out
    at::Tensor&(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Scalar&,
                const at::Scalar&, at::Tensor&),  // addmv.out
    at::Tensor&(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                std::optional<at::ScalarType>, bool, at::Tensor&),               // _scaled_mm.out
    at::Tensor&(const at::Tensor&, std::optional<at::ScalarType>, at::Tensor&),  // mean.dtype_out
    at::Tensor(const at::ITensorListRef&, int64_t),                              // cat
    at::Tensor(const at::Scalar&, const at::Tensor&),                            // pow.Scalar
    at::Tensor(const at::Tensor&),                                               // abs
    at::Tensor(const at::Tensor&, at::IntArrayRef),                              // flip
    at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool, bool,
               std::optional<int64_t>),  // avg_pool2d
    at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, bool, std::optional<double>,
               std::optional<double>),  // upsample_bilinear2d_backward
    at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, std::optional<double>,
               std::optional<double>),                     // upsample_nearest2d_backward
    at::Tensor(const at::Tensor&, at::IntArrayRef, bool),  // logsumexp
    at::Tensor(const at::Tensor&, at::IntArrayRef, bool, std::optional<double>,
               std::optional<double>),  // upsample_bilinear2d
    at::Tensor(const at::Tensor&, at::IntArrayRef, std::optional<double>,
               std::optional<double>),                                   // upsample_nearest2d
    at::Tensor(const at::Tensor&, at::OptionalIntArrayRef, bool),        // all.dims
    at::Tensor(const at::Tensor&, at::OptionalIntArrayRef, bool, bool),  // std.dim
    at::Tensor(const at::Tensor&, at::OptionalIntArrayRef, bool,
               std::optional<at::ScalarType>),  // mean.dim
    at::Tensor(const at::Tensor&, at::OptionalIntArrayRef, const std::optional<at::Scalar>&,
               bool),  // std.correction
    at::Tensor(const at::Tensor&, at::OptionalSymIntArrayRef, bool,
               std::optional<at::ArrayRef<double>>),  // upsample_bilinear2d.vec
    at::Tensor(const at::Tensor&, at::OptionalSymIntArrayRef,
               std::optional<at::ArrayRef<double>>),                      // upsample_nearest2d.vec
    at::Tensor(const at::Tensor&, bool),                                  // std
    at::Tensor(const at::Tensor&, c10::SymIntArrayRef),                   // _adaptive_avg_pool2d
    at::Tensor(const at::Tensor&, c10::SymIntArrayRef, at::IntArrayRef),  // roll
    at::Tensor(const at::Tensor&, c10::SymIntArrayRef, const at::Scalar&),  // constant_pad_nd
    at::Tensor(const at::Tensor&, const at::Scalar&),                       // div.Scalar
    at::Tensor(const at::Tensor&, const at::Scalar&, at::OptionalIntArrayRef, bool,
               std::optional<at::ScalarType>),                            // linalg_vector_norm
    at::Tensor(const at::Tensor&, const at::Scalar&, const at::Scalar&),  // add.Scalar
    at::Tensor(const at::Tensor&, const at::Scalar&, const at::Scalar&, const at::Scalar&),  // elu
    at::Tensor(const at::Tensor&, const at::Scalar&, const at::Scalar&, const at::Scalar&, bool,
               const at::Tensor&),                                        // elu_backward
    at::Tensor(const at::Tensor&, const at::Scalar&, const at::Tensor&),  // where.ScalarSelf
    at::Tensor(const at::Tensor&, const at::Scalar&,
               std::optional<std::string_view>),       // div.Scalar_mode
    at::Tensor(const at::Tensor&, const at::Tensor&),  // bmm
    at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
               at::IntArrayRef, at::IntArrayRef, bool,
               const at::Tensor&),  // max_pool2d_with_indices_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
               at::IntArrayRef, bool, bool, std::optional<int64_t>),   // avg_pool2d_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, at::ScalarType),  // bmm.dtype
    at::Tensor(const at::Tensor&, const at::Tensor&, at::TensorList, at::IntArrayRef,
               at::IntArrayRef, at::TensorList, at::IntArrayRef, at::IntArrayRef,
               const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
               std::optional<at::ScalarType>, at::IntArrayRef, bool),  // _scaled_grouped_mm_v2
    at::Tensor(const at::Tensor&, const at::Tensor&, at::TensorList, at::IntArrayRef,
               at::IntArrayRef, at::TensorList, at::IntArrayRef, at::IntArrayRef,
               const std::optional<at::Tensor>&, std::optional<at::ScalarType>, at::IntArrayRef,
               bool),                                                           // _scaled_mm_v2
    at::Tensor(const at::Tensor&, const at::Tensor&, bool),                     // copy
    at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt, bool, bool),  // embedding
    at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt,
               bool),  // embedding_dense_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef,
               c10::SymIntArrayRef, c10::SymInt, bool, bool, bool),  // cudnn_convolution
    at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef,
               c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt, bool, bool,
               bool),  // cudnn_convolution_transpose
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::ITensorListRef&, at::IntArrayRef,
               at::IntArrayRef, const at::ITensorListRef&, at::IntArrayRef, at::IntArrayRef,
               const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
               std::optional<at::ScalarType>, at::IntArrayRef, bool),  // _scaled_grouped_mm_v2
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::ITensorListRef&, at::IntArrayRef,
               at::IntArrayRef, const at::ITensorListRef&, at::IntArrayRef, at::IntArrayRef,
               const std::optional<at::Tensor>&, std::optional<at::ScalarType>, at::IntArrayRef,
               bool),                                                     // _scaled_mm_v2
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Scalar&),  // add.Tensor
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Scalar&,
               bool),  // leaky_relu_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Scalar&,
               const at::Scalar&),                                        // hardtanh_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&),  // _weight_int8pack_mm
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ScalarType,
               const at::Scalar&, const at::Scalar&),  // baddbmm.dtype
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const at::Scalar&),  // addcmul
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Scalar&,
               const at::Scalar&),  // addmv
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Scalar&,
               const at::Scalar&, bool),  // _addmm_activation
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
               const std::optional<at::Tensor>&, std::optional<at::ScalarType>,
               bool),  // _scaled_grouped_mm
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
               std::optional<at::ScalarType>, bool),  // _scaled_mm
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>&, int64_t),  // binary_cross_entropy_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>&, int64_t, int64_t,
               const at::Tensor&),  // nll_loss_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>&,
               std::optional<std::string_view>),  // _mixed_dtypes_linear
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
               int64_t),  // mse_loss_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
               double),  // huber_loss_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&),  // linear
    at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
               c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, bool,
               c10::SymIntArrayRef, c10::SymInt),  // convolution
    at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
               c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef,
               c10::SymInt),  // mkldnn_convolution
    at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
               const std::optional<at::Tensor>&, std::optional<at::ScalarType>),  // _grouped_mm
    at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
               int64_t),                                        // binary_cross_entropy
    at::Tensor(const at::Tensor&, const at::Tensor&, double),   // native_dropout_backward
    at::Tensor(const at::Tensor&, const at::Tensor&, int64_t),  // mse_loss
    at::Tensor(const at::Tensor&, const at::Tensor&, int64_t,
               at::ScalarType),  // _log_softmax_backward_data
    at::Tensor(const at::Tensor&, const at::Tensor&, int64_t,
               const at::Tensor&),                                      // _weight_int4pack_mm
    at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, double),  // smooth_l1_loss
    at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t, bool),  // grid_sampler_2d
    at::Tensor(const at::Tensor&, const at::Tensor&,
               std::optional<std::string_view>),                                 // div.Tensor_mode
    at::Tensor(const at::Tensor&, const at::Tensor&, std::string_view),          // gelu_backward
    at::Tensor(const at::Tensor&, const c10::List<std::optional<at::Tensor>>&),  // index.Tensor
    at::Tensor(const at::Tensor&, const c10::List<std::optional<at::Tensor>>&, const at::Tensor&,
               bool),  // index_put
    at::Tensor(const at::Tensor&, const c10::List<std::optional<at::Tensor>>&, const at::Tensor&,
               bool, bool),  // _index_put_impl
    at::Tensor(const at::Tensor&, const std::optional<at::Scalar>&, at::IntArrayRef,
               bool),  // norm.ScalarOpt_dim
    at::Tensor(const at::Tensor&, const std::optional<at::Scalar>&, at::IntArrayRef, bool,
               at::ScalarType),  // norm.ScalarOpt_dim_dtype
    at::Tensor(const at::Tensor&, const std::optional<at::Scalar>&,
               at::ScalarType),  // norm.ScalarOpt_dtype
    at::Tensor(const at::Tensor&, const std::optional<at::Scalar>&,
               const std::optional<at::Scalar>&),  // clamp
    at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&,
               const std::optional<at::Tensor>&),                                  // clamp.Tensor
    at::Tensor(const at::Tensor&, int64_t),                                        // triu
    at::Tensor(const at::Tensor&, int64_t, bool),                                  // all.dim
    at::Tensor(const at::Tensor&, int64_t, bool, std::optional<at::ScalarType>),   // prod.dim_int
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&),                     // index_select
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, bool),               // gather
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Scalar&),  // scatter.value
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Scalar&,
               std::string_view),  // scatter.value_reduce
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&),  // scatter.src
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
               const at::Scalar&),  // index_add
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
               std::string_view),  // scatter.reduce
    at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&, std::string_view,
               bool),                                                       // scatter_reduce.two
    at::Tensor(const at::Tensor&, int64_t, std::optional<at::ScalarType>),  // cumprod
    at::Tensor(const at::Tensor&, std::optional<at::MemoryFormat>),         // clone
    at::Tensor(const at::Tensor&, std::optional<at::ScalarType>),           // mean
    at::Tensor(const at::Tensor&, std::optional<at::ScalarType>, std::optional<at::Layout>,
               std::optional<at::Device>, std::optional<bool>, bool,
               std::optional<at::MemoryFormat>),                  // _to_copy
    at::Tensor(const at::Tensor&, std::optional<int64_t>, bool),  // argmax
    at::Tensor(const at::Tensor&, std::string_view),              // gelu
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const at::Tensor&, const at::Tensor&, double,
        double),  // _batch_norm_with_update_functional
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, c10::SymInt, c10::SymInt, double, bool, bool,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, std::optional<double>, std::optional<c10::SymInt>,
        std::optional<c10::SymInt>, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _flash_attention_forward.quantized
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, c10::SymInt, c10::SymInt, double, bool, bool,
        std::optional<double>, std::optional<c10::SymInt>, std::optional<c10::SymInt>,
        const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _flash_attention_forward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, c10::SymInt, c10::SymInt, double, bool, bool,
        std::optional<double>, std::optional<c10::SymInt>, std::optional<c10::SymInt>,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, std::optional<int64_t>),  // _flash_attention_forward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const at::Tensor&, const at::Tensor&, bool, double,
        double),  // _native_batch_norm_legit_functional
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
               at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        bool, double, bool, bool, std::optional<double>),  // _scaled_dot_product_cudnn_attention
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
               at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, c10::SymInt,
        c10::SymInt, bool, double, bool, bool, std::optional<double>),  // _cudnn_attention_forward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
               at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, c10::SymInt,
        c10::SymInt, bool, double, bool, bool, std::optional<double>,
        const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _cudnn_attention_forward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
               at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, double, bool, bool,
        std::optional<double>),  // _scaled_dot_product_flash_attention.quantized
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
               at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        double, bool, bool,
        std::optional<double>),  // _scaled_dot_product_fused_attention_overrideable
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
               at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, double, bool, bool,
        std::optional<double>),  // _scaled_dot_product_flash_attention
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        std::optional<c10::SymInt>, std::optional<c10::SymInt>, double, int64_t, bool,
        std::optional<double>, const std::optional<at::Tensor>&,
        std::optional<int64_t>),  // _efficient_attention_forward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, int64_t, bool,
        const std::optional<at::Tensor>&, bool, int64_t),  // _embedding_bag_forward_only
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, double, std::array<bool, 4>, bool,
        std::optional<double>),  // _scaled_dot_product_efficient_attention_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, std::array<bool, 4>, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double, bool,
        const at::Tensor&, const at::Tensor&,
        std::optional<double>),  // _scaled_dot_product_fused_attention_overrideable_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const std::optional<at::Tensor>&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, c10::SymInt, c10::SymInt, const at::Tensor&, double,
        const at::Tensor&, const at::Tensor&, int64_t, bool, std::optional<double>,
        std::optional<int64_t>, std::optional<int64_t>, bool),  // _efficient_attention_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        bool, double, bool, std::optional<double>),  // _scaled_dot_product_efficient_attention
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool, double,
        double),  // cudnn_batch_norm
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        at::Tensor&, at::Tensor&, double, double),  // _batch_norm_with_update
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, c10::SymIntArrayRef, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, double),  // native_layer_norm
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef, const at::Tensor&,
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        std::array<bool, 3>),  // native_layer_norm_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, at::OptionalSymIntArrayRef,
        c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef, bool, c10::SymIntArrayRef,
        c10::SymInt, std::array<bool, 3>),  // convolution_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
        c10::SymIntArrayRef, c10::SymIntArrayRef, bool, c10::SymIntArrayRef, c10::SymInt,
        std::array<bool, 3>),  // convolution_backward_overrideable
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
        c10::SymInt, double, bool, const at::Tensor&, const at::Tensor&,
        std::optional<double>),  // _scaled_dot_product_flash_attention_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
        c10::SymInt, double, bool, const at::Tensor&, const at::Tensor&, std::optional<double>,
        std::optional<c10::SymInt>, std::optional<c10::SymInt>),  // _flash_attention_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double,
        bool, std::optional<double>),  // _scaled_dot_product_cudnn_attention_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, const at::Tensor&, double, bool, const std::optional<at::Tensor>&,
        std::optional<double>),  // _scaled_dot_product_flash_attention_for_cpu_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const std::optional<at::Tensor>&, c10::SymInt, c10::SymInt, c10::SymInt, int64_t,
        std::array<bool, 3>),  // native_group_norm_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _thnn_fused_lstm_cell
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, bool, double, std::array<bool, 3>,
        const at::Tensor&),  // batch_norm_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, double, const at::Tensor&),  // cudnn_batch_norm_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool, double,
        std::array<bool, 3>),  // native_batch_norm_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        at::Tensor&, at::Tensor&, bool, double, double),  // _native_batch_norm_legit
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool,
        double, double),  // _native_batch_norm_legit.no_stats
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        c10::SymInt, c10::SymInt, c10::SymInt, int64_t, double),  // native_group_norm
    std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool, double,
        double),                                            // native_batch_norm
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&),  // log_sigmoid_forward
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
                                       at::IntArrayRef, at::IntArrayRef,
                                       bool),  // max_pool2d_with_indices
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, at::IntArrayRef,
                                       const std::optional<at::Tensor>&,
                                       std::optional<double>),  // _fused_rms_norm
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, at::OptionalIntArrayRef, bool,
                                       bool),  // var_mean.dim
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, at::OptionalIntArrayRef,
                                       const std::optional<at::Scalar>&,
                                       bool),                     // var_mean.correction
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, bool),  // var_mean
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, c10::SymInt, int64_t, bool),  // kthvalue
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                                       const at::Tensor&, const std::optional<at::Tensor>&,
                                       std::array<bool, 2>),  // _fused_rms_norm_backward
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       const std::optional<at::Tensor>&,
                                       const std::optional<at::Tensor>&),  // _thnn_fused_gru_cell
    std::tuple<at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, double, bool,
        const std::optional<at::Tensor>&,
        std::optional<double>),  // _scaled_dot_product_flash_attention_for_cpu
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       int64_t, int64_t, bool,
                                       std::array<bool, 2>),  // grid_sampler_2d_backward
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                       const std::optional<at::Tensor>&, int64_t,
                                       int64_t),  // nll_loss_forward
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, double,
                                       std::optional<bool>),               // native_dropout
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, int64_t, bool),  // max.dim
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, int64_t, int64_t, bool, bool),  // topk
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, std::optional<bool>, int64_t,
                                       bool),  // sort.stable
    std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, std::optional<int64_t>, bool),  // aminmax
    std::tuple<std::vector<at::Tensor>, at::Tensor>(
        at::TensorList, const at::Tensor&,
        const at::Tensor&),  // _amp_foreach_non_finite_check_and_unscale
    std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>,
               std::vector<at::Tensor>, std::vector<at::Tensor>>(
        at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
        at::TensorList, const at::Tensor&, double, double, double, double, bool, bool,
        const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _fused_adam.tensor_lr
    std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>,
               std::vector<at::Tensor>, std::vector<at::Tensor>>(
        at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
        at::TensorList, double, double, double, double, double, bool, bool,
        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&),  // _fused_adam
    std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>,
               std::vector<at::Tensor>>(at::TensorList, at::TensorList, at::TensorList,
                                        at::TensorList, double, double, double, double, bool,
                                        const std::optional<at::Tensor>&,
                                        const std::optional<at::Tensor>&),  // _fused_adagrad
    std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>(
        at::TensorList, at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, double,
        double, double, bool, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _fused_adagrad.tensor_lr
    std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>(
        at::TensorList, at::TensorList, at::TensorList, double, double, const at::Tensor&, double,
        bool, bool, bool, const std::optional<at::Tensor>&,
        const std::optional<at::Tensor>&),  // _fused_sgd.tensor_lr
    std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>(
        at::TensorList, at::TensorList, at::TensorList, double, double, double, double, bool, bool,
        bool, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&),  // _fused_sgd
    std::vector<at::Tensor>(at::TensorList),                                        // _foreach_sqrt
    std::vector<at::Tensor>(at::TensorList, at::ArrayRef<at::Scalar>),  // _foreach_add.ScalarList
    std::vector<at::Tensor>(at::TensorList, at::TensorList),            // _foreach_mul.List
    std::vector<at::Tensor>(at::TensorList, at::TensorList,
                            at::ArrayRef<at::Scalar>),  // _foreach_lerp.ScalarList
    std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList),  // _foreach_lerp.List
    std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList,
                            at::ArrayRef<at::Scalar>),  // _foreach_addcdiv.ScalarList
    std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList,
                            const at::Scalar&),  // _foreach_addcdiv.Scalar
    std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList,
                            const at::Tensor&),                     // _foreach_addcdiv.Tensor
    std::vector<at::Tensor>(at::TensorList, at::TensorList, bool),  // _foreach_copy
    std::vector<at::Tensor>(at::TensorList, at::TensorList,
                            const at::Scalar&),                  // _foreach_add.List
    std::vector<at::Tensor>(at::TensorList, const at::Scalar&),  // _foreach_add.Scalar
    std::vector<at::Tensor>(at::TensorList, const at::Scalar&,
                            std::optional<at::ScalarType>),      // _foreach_norm.Scalar
    std::vector<at::Tensor>(at::TensorList, const at::Tensor&),  // _foreach_mul.Tensor
    std::vector<at::Tensor>(at::TensorList, const at::Tensor&,
                            const at::Scalar&),      // _foreach_add.Tensor
    std::vector<at::Tensor>(const at::Tensor&),      // where
    void(at::TensorList),                            // _foreach_sqrt_
    void(at::TensorList, at::ArrayRef<at::Scalar>),  // _foreach_add_.ScalarList
    void(at::TensorList, at::Tensor&,
         const at::Tensor&),               // _amp_foreach_non_finite_check_and_unscale_
    void(at::TensorList, at::TensorList),  // _foreach_mul_.List
    void(at::TensorList, at::TensorList, at::ArrayRef<at::Scalar>),  // _foreach_lerp_.ScalarList
    void(at::TensorList, at::TensorList, at::TensorList),            // _foreach_lerp_.List
    void(at::TensorList, at::TensorList, at::TensorList,
         at::ArrayRef<at::Scalar>),  // _foreach_addcdiv_.ScalarList
    void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
         at::TensorList, const at::Tensor&, double, double, double, double, bool, bool,
         const std::optional<at::Tensor>&,
         const std::optional<at::Tensor>&),  // _fused_adam_.tensor_lr
    void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
         at::TensorList, double, double, double, double, double, bool, bool,
         const std::optional<at::Tensor>&, const std::optional<at::Tensor>&),  // _fused_adam_
    void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, double,
         double, double, bool, const std::optional<at::Tensor>&,
         const std::optional<at::Tensor>&),  // _fused_adagrad_.tensor_lr
    void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double, double,
         double, bool, const std::optional<at::Tensor>&,
         const std::optional<at::Tensor>&),  // _fused_adagrad_
    void(at::TensorList, at::TensorList, at::TensorList,
         const at::Scalar&),  // _foreach_addcdiv_.Scalar
    void(at::TensorList, at::TensorList, at::TensorList,
         const at::Tensor&),  // _foreach_addcdiv_.Tensor
    void(at::TensorList, at::TensorList, at::TensorList, double, double, const at::Tensor&, double,
         bool, bool, bool, const std::optional<at::Tensor>&,
         const std::optional<at::Tensor>&),  // _fused_sgd_.tensor_lr
    void(at::TensorList, at::TensorList, at::TensorList, double, double, double, double, bool, bool,
         bool, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&),  // _fused_sgd_
    void(at::TensorList, at::TensorList, bool),                 // _foreach_copy_
    void(at::TensorList, at::TensorList, const at::Scalar&),    // _foreach_add_.List
    void(at::TensorList, const at::Scalar&),                    // _foreach_add_.Scalar
    void(at::TensorList, const at::Tensor&),                    // _foreach_mul_.Tensor
    void(at::TensorList, const at::Tensor&, const at::Scalar&)  // _foreach_add_.Tensor
    >;

}  // namespace opgraft
