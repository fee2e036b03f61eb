#include "observer.h"

#include <chrono>

namespace opgraft {

namespace {

// An observer's own error must not become the call's.
void report() {
  PyErr_WriteUnraisable(nullptr);
}

}  // namespace

void PythonObserver::observe(Call& call, bool kept, const std::function<void()>& route) {
  const PythonRef function = begin(call, kept);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  try {
    route();
  } catch (...) {
    end(function, call, /*raised=*/true, seconds());
    throw;
  }
  end(function, call, /*raised=*/false, seconds());
}

PythonRef PythonObserver::begin(const Call& call, bool kept) const {
  const Router::InPython here;
  if (!here.allowed()) return {};
  const WithGil gil;
  if (!begin_.get()) return {};  // nothing is registered there yet
  const auto values = signature_->to_python(call.begin());
  auto function = py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
      begin_.get().ptr(), values.ptr(), kept ? Py_True : Py_False, nullptr));
  if (!function) report();
  if (!function || function.is_none()) return {};
  return PythonRef(std::move(function));
}

void PythonObserver::end(const PythonRef& function, const Call& call, bool raised,
                         double seconds) {
  if (!function.get()) return;
  const Router::InPython here;
  if (!here.allowed()) return;
  const WithGil gil;
  py::object ran = py::none();
  if (call.ran != nullptr) {
    ran = py::make_tuple(call.ran->identity.pack, call.ran->identity.name);
  }
  const py::float_ spent(seconds);
  const auto done = py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
      function.get().ptr(), ran.ptr(), call.fell_back ? Py_True : Py_False,
      raised ? Py_True : Py_False, spent.ptr(), nullptr));
  if (!done) report();
}

}  // namespace opgraft
