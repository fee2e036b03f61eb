#include "python.h"

#include <torch/csrc/Exceptions.h>

#include "epochs.h"
#include "thread_states.h"
#include "torch_python.h"

namespace opgraft {

namespace {

// Sets this thread's Dynamo callback; None removes it. Returns the previous one, or null if Dynamo
// is not available.
PyObject* set_eval_frame(PyObject* callback) {
  static PyObject* const setter = [] {  // never destroyed: calls may come late
    PyObject* module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
    PyObject* found =
        module == nullptr ? nullptr : PyObject_GetAttrString(module, "set_eval_frame");
    Py_XDECREF(module);
    if (found == nullptr) PyErr_Clear();
    return found;
  }();
  if (setter == nullptr) return nullptr;
  PyObject* before = PyObject_CallOneArg(setter, callback);
  if (before == nullptr) PyErr_Clear();
  return before;
}

}  // namespace

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;  // NOLINT: torch's own exception restores type, value and traceback
}

PythonRef::~PythonRef() {
  if (object_ == nullptr || !Py_IsInitialized()) return;
  const Router::InPython here;
  if (!here.allowed()) return;  // the process is ending: leak it
  const WithGil gil;
  Py_DECREF(object_);
}

WithGil::WithGil() {
  // Only a thread without a state gets one here.
  if (C10_UNLIKELY(PyGILState_GetThisThreadState() == nullptr)) ThreadStates::create();
  state_ = PyGILState_Ensure();
  untraced_.emplace();
  if (C10_UNLIKELY(ThreadStates::any_ended())) ThreadStates::delete_ended();
  if (C10_UNLIKELY(Epochs::has_retired())) Epochs::instance().collect();
}

WithoutDynamo::WithoutDynamo() {
  // Dynamo installs its own frame evaluation while any thread compiles or runs compiled code.
  if (C10_LIKELY(_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) ==
                 _PyEval_EvalFrameDefault)) {
    return;
  }
  callback_ = set_eval_frame(Py_None);
}

WithoutDynamo::~WithoutDynamo() {
  if (callback_ == nullptr) return;
  // An error may be set for the caller. Python must not be called while one is set.
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  Py_XDECREF(set_eval_frame(callback_));
  Py_DECREF(callback_);
  PyErr_Restore(type, value, traceback);
}

}  // namespace opgraft
