// Two functions of libtorch_python. They are declared here because their header,
// torch/csrc/jit/python/pybind_utils.h, takes longer to compile than all other headers together. If
// a later torch changes one, the core does not load, which the build notices.
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
