// Access to Python from C++: references, the GIL, calls, errors.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

#include "router.h"

namespace opgraft {

namespace py = pybind11;

// A reference to a Python object that may be dropped on any thread, with or without the GIL.
class PythonRef {
 public:
  PythonRef() = default;
  explicit PythonRef(py::object object) : object_(object.release().ptr()) {}
  PythonRef(PythonRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PythonRef& operator=(PythonRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PythonRef();

  py::handle get() const noexcept { return object_; }

 private:
  PyObject* object_ = nullptr;
};

// Throws the Python error that is set, as torch's exception type.
[[noreturn]] void throw_python_error();

// While it lives, Dynamo traces nothing on this thread. After a graph break, ops run while Dynamo's
// frame evaluation is on. Dynamo would then compile impls and the router's own Python as if they
// were part of the model. Needs the GIL. Costs one comparison while no thread compiles.
class WithoutDynamo {
 public:
  WithoutDynamo();
  ~WithoutDynamo();
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  PyObject* callback_ = nullptr;  // Dynamo's callback to restore; null: nothing was changed
};

// Holds the GIL and keeps Dynamo out, also on a thread that Python does not know (Note [Thread
// states]). Also does the work that was left for a thread with the GIL.
class WithGil {
 public:
  WithGil();
  ~WithGil() {
    untraced_.reset();
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
  std::optional<WithoutDynamo> untraced_;
};

// Enters Python for a call. While it lives it holds the GIL. It is false if the interpreter is
// exiting: then the caller must do without Python.
class PythonAccess {
 public:
  PythonAccess() {
    if (here_.allowed()) gil_.emplace();
  }
  explicit operator bool() const noexcept { return gil_.has_value(); }

 private:
  Router::InPython here_;
  std::optional<WithGil> gil_;
};

// Calls a Python function. If it raises, returns null with Python's error set. Needs the GIL.
template <class... Arguments>
py::object try_python(py::handle function, const Arguments&... arguments) {
  return py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
      function.ptr(), py::handle(arguments).ptr()..., static_cast<PyObject*>(nullptr)));
}

// Calls a Python function, and throws what it raises. Needs the GIL.
template <class... Arguments>
py::object call_python(py::handle function, const Arguments&... arguments) {
  auto result = try_python(function, arguments...);
  if (!result) throw_python_error();
  return result;
}

// `function(wait)` is what `withdraw_overrides` calls.
void set_withdraw_function(py::object function);

}  // namespace opgraft
