// How C++ gets to Python: references, the GIL, one way to call, one way to throw.
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

// Throws the Python error that is set, as torch hands it through C++.
[[noreturn]] void throw_python_error();

// While it lives, Dynamo traces nothing that runs on this thread. Where a graph breaks, PyTorch's
// ops are called with Dynamo's frame evaluation on: it would compile an impl, and the router's own
// Python, as if they were the model's. Needs the GIL, and costs a comparison while no thread
// compiles.
class WithoutDynamo {
 public:
  WithoutDynamo();
  ~WithoutDynamo();
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  PyObject* callback_ = nullptr;  // what Dynamo calls for a frame; null: nothing was changed
};

// Holds the GIL to call Python, which Dynamo does not trace, on a thread that Python never saw too
// (Note [Thread states]); and does what waits for somebody who has the GIL.
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

// The way of a call to Python: false once the interpreter is going away, and then it is for whoever
// asks to do without; else the GIL is held while it lives.
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

// Calls a Python function; null with Python's error set where it raises. Needs the GIL.
template <class... Arguments>
py::object try_python(py::handle function, const Arguments&... arguments) {
  return py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
      function.ptr(), py::handle(arguments).ptr()..., static_cast<PyObject*>(nullptr)));
}

// The same; throws what it raises, as torch hands it through C++.
template <class... Arguments>
py::object call_python(py::handle function, const Arguments&... arguments) {
  auto result = try_python(function, arguments...);
  if (!result) throw_python_error();
  return result;
}

}  // namespace opgraft
