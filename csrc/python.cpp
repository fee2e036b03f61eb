#include "python.h"

#include <torch/csrc/Exceptions.h>

#include "epochs.h"
#include "thread_states.h"
#include "torch_python.h"

namespace opgraft {

namespace {

// Gives this thread another callback of Dynamo's; returns the one of before, or null where Dynamo
// is not to be had. `None` is none.
PyObject* set_eval_frame(PyObject* callback) {
  static PyObject* const setter = [] {  // never destroyed: calls may come until the process ends
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
  throw error;  // NOLINT: torch's own type, which restores type, value and traceback
}

PythonRef::~PythonRef() {
  if (object_ == nullptr || !Py_IsInitialized()) return;
  const Router::InPython here;
  if (!here.allowed()) return;  // the process ends anyway
  const WithGil gil;
  Py_DECREF(object_);
}

WithGil::WithGil() {
  // On a thread that has a state already this makes none; PyGILState_GetThisThreadState tells.
  if (C10_UNLIKELY(PyGILState_GetThisThreadState() == nullptr)) ThreadStates::keep();
  state_ = PyGILState_Ensure();
  untraced_.emplace();
  if (C10_UNLIKELY(ThreadStates::any_ended())) ThreadStates::delete_ended();
  if (C10_UNLIKELY(Epochs::has_left())) Epochs::instance().collect();
}

WithoutDynamo::WithoutDynamo() {
  // Dynamo puts its own frame evaluation in while any thread compiles or runs what it compiled.
  if (C10_LIKELY(_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) ==
                 _PyEval_EvalFrameDefault)) {
    return;
  }
  callback_ = set_eval_frame(Py_None);
}

WithoutDynamo::~WithoutDynamo() {
  if (callback_ == nullptr) return;
  // An error may be on its way to the caller: calling Python with one set is not allowed.
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  Py_XDECREF(set_eval_frame(callback_));
  Py_DECREF(callback_);
  PyErr_Restore(type, value, traceback);
}

}  // namespace opgraft
