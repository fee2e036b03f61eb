// Functions of torch that are declared here, because their headers take seconds to compile:
// torch/csrc/jit/python/pybind_utils.h, torch/csrc/autograd/python_variable.h and
// ATen/autocast_mode.h. If a later torch changes one, the core does not load, which the build
// notices.
#pragma once

#include <ATen/core/TensorBase.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace torch::jit {

TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type,
                                      std::optional<int32_t> size = std::nullopt);

TORCH_PYTHON_API py::object toPyObject(c10::IValue value);

}  // namespace torch::jit

namespace at::autocast {

TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);

}  // namespace at::autocast

TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
// torch.Tensor and torch.nn.Parameter.
TORCH_PYTHON_API extern PyObject* THPVariableClass;
TORCH_PYTHON_API extern PyObject* ParameterClass;
