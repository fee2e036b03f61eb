#include "observer.h"

#include <chrono>

namespace opgraft {

namespace {

// An observer's own error must not become the call's. Ctrl-C is the program's: it is raised again
// where the program goes on.
void report_unraisable() {
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_Clear();
    PyErr_SetInterrupt();
  } else {
    PyErr_WriteUnraisable(nullptr);
  }
}

}  // namespace

void PythonObserver::observe(Call& call, bool keeps_derivative,
                             const std::function<void()>& route) {
  const PythonRef function = begin(call, keeps_derivative);
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

bool PythonObserver::decompose(Call& call) {
  const PythonAccess python;
  if (!python || !decompose_.get()) return false;
  const auto result = call_python(decompose_.get(), converter_->to_python(call.begin()));
  if (result.is(py::handle(Py_NotImplemented))) return false;
  const auto who = "the decomposition of " + c10::toString(call.op.operator_name());
  auto results = converter_->to_results(result, who);
  call.set_results(results);
  return true;
}

PythonRef PythonObserver::begin(const Call& call, bool keeps_derivative) const {
  const PythonAccess python;
  if (!python) return {};
  if (!begin_.get()) return {};  // no override is registered yet
  const auto values = converter_->to_python(call.begin());
  auto function = try_python(begin_.get(), values, py::bool_(keeps_derivative));
  if (!function) report_unraisable();
  if (!function || function.is_none()) return {};
  return PythonRef(std::move(function));
}

void PythonObserver::end(const PythonRef& function, const Call& call, bool raised, double seconds) {
  if (!function.get()) return;
  const PythonAccess python;
  if (!python) return;
  py::object ran = py::none();
  if (call.ran != nullptr) {
    ran = py::make_tuple(call.ran->identity.pack, call.ran->identity.name);
  }
  const auto done = try_python(function.get(), ran, py::bool_(call.fell_back), py::bool_(raised),
                               py::float_(seconds));
  if (!done) report_unraisable();
}

}  // namespace opgraft
