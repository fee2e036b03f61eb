#include "outdated.h"

#include <atomic>

#include "python.h"
#include "router.h"

namespace opgraft {

namespace {

// Never released: any thread may need it at any time.
py::handle withdraw_function;

std::atomic<bool> is_scheduled{false};

// The main thread may be anywhere, also in a change of overrides. So nothing here waits for a lock
// of Python's.
int withdraw_on_main_thread(void*) {
  is_scheduled.store(false);
  {
    const py::gil_scoped_release release;
    Router::deregister_outdated();
  }
  const PythonAccess python;
  if (!python || !withdraw_function) return 0;
  // A warning that is an error by the user's filters is not the interrupted code's.
  if (!try_python(withdraw_function, py::bool_(false))) PyErr_WriteUnraisable(nullptr);
  return 0;
}

}  // namespace

void set_withdraw_function(py::object function) { withdraw_function = function.release(); }

void schedule_withdrawal() noexcept {
  if (!is_scheduled.exchange(true) && Py_AddPendingCall(&withdraw_on_main_thread, nullptr) != 0)
    is_scheduled.store(false);  // the main thread has too much to do; a call does it
}

void withdraw_overrides() {
  const PythonAccess python;
  if (python && withdraw_function) call_python(withdraw_function, py::bool_(true));
}

}  // namespace opgraft
