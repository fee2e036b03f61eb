// How Python code runs where a native kernel runs: below `__torch_function__`.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "torch_python.h"

namespace opgraft {

// Whether an object is a tensor of a subclass, or a list with one.
inline bool has_subclass(PyObject* value) noexcept {
  PyTypeObject* const type = Py_TYPE(value);
  if (C10_UNLIKELY(PyList_CheckExact(value))) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      if (has_subclass(PyList_GET_ITEM(value, i))) return true;
    }
    return false;
  }
  const auto* const tensor = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  return type != tensor && type != reinterpret_cast<PyTypeObject*>(ParameterClass) &&
         PyType_IsSubtype(type, const_cast<PyTypeObject*>(tensor)) != 0;
}

// While it lives, no mode's `__torch_function__` sees what this thread calls, and if an argument is
// of a subclass, no subclass's does. Calls from Python have passed them before they get to a
// router; calls from C++, such as autograd's, never see them, nor does a native kernel.
//
// Otherwise subclasses keep theirs: an impl may make tensors of one. Modes that an impl enters hold
// inside it.
class BelowTorchFunction {
  using State = at::impl::PythonTorchFunctionTLS;

 public:
  explicit BelowTorchFunction(const std::vector<py::object>& arguments) {
    bool any_subclass = false;
    for (const auto& each : arguments) any_subclass |= has_subclass(each.ptr());
    const auto disabled = State::get_disabled_state();
    const bool disables = any_subclass && disabled == at::impl::ENABLED;
    if (C10_LIKELY(!disables && State::stack_len() == 0)) return;
    before_ = State::get_state();
    State::set_state({});
    State::set_disabled_state(disables ? at::impl::SUBCLASSES_DISABLED : disabled);
  }
  ~BelowTorchFunction() {
    if (C10_UNLIKELY(before_.has_value())) State::set_state(*before_);
  }
  BelowTorchFunction(const BelowTorchFunction&) = delete;
  BelowTorchFunction& operator=(const BelowTorchFunction&) = delete;

 private:
  std::optional<State> before_;
};

}  // namespace opgraft
