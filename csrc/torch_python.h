// Two functions of libtorch_python, declared here because of what their own header costs: the
// compiler takes longer over torch/csrc/jit/python/pybind_utils.h than over all other headers
// together. Should a later torch change one, the core does not load, which the build finds out.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace torch::jit {

TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type,
                                      std::optional<int32_t> size = std::nullopt);

TORCH_PYTHON_API py::object toPyObject(c10::IValue value);

}  // namespace torch::jit
