// Callers in C++ for benchmarks/launch.py: bursts of calls of an op with the GIL released, timed on
// the host without waiting for the device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string>
#include <vector>

namespace {

constexpr double kEps = 1e-6;

void call(const std::string& op, const std::vector<at::Tensor>& t) {
  if (op == "rms_norm") {
    at::_fused_rms_norm(t[0], {t[0].size(-1)}, t[1], kEps);
  } else if (op == "rms_norm_backward") {
    at::_fused_rms_norm_backward(t[0], t[1], {t[1].size(-1)}, t[2], t[3], {true, true});
  } else if (op == "layer_norm") {
    at::native_layer_norm(t[0], {t[0].size(-1)}, t[1], t[2], kEps);
  } else if (op == "layer_norm_backward") {
    at::native_layer_norm_backward(t[0], t[1], {t[1].size(-1)}, t[2], t[3], t[4], t[5],
                                   {true, true, true});
  } else {
    at::scaled_dot_product_attention(t[0], t[1], t[2]);
  }
}

// Microseconds of a call.
double burst(const std::string& op, const std::vector<at::Tensor>& tensors, int64_t calls) {
  const py::gil_scoped_release release;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) call(op, tensors);
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / static_cast<double>(calls);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("burst", &burst, py::arg("op"), py::arg("tensors"), py::arg("calls"));
}
