#include "thread_states.h"

#include <pthread.h>

#include <new>
#include <utility>

namespace opgraft {

struct ThreadStates::Entry {
  PyThreadState* state = nullptr;
  bool was_called = false;
  Entry* next = nullptr;
};

namespace {

pthread_key_t make_key(void (*destructor)(void*)) {
  pthread_key_t key{};
  return pthread_key_create(&key, destructor) == 0 ? key : PTHREAD_KEYS_MAX;
}

pthread_key_t key_with(void (*destructor)(void*)) {
  static const pthread_key_t key = make_key(destructor);
  return key;
}

}  // namespace

void ThreadStates::create() {
  // Never released: later calls of PyGILState_Ensure nest in this one, and so do not delete the
  // state.
  PyGILState_Ensure();
  auto* entry = new (std::nothrow) Entry;
  PyThreadState* state = PyEval_SaveThread();
  if (entry == nullptr) return;
  entry->state = state;
  // If that fails, the state lives until Python ends.
  if (pthread_setspecific(key_with(&on_thread_exit), entry) != 0) delete entry;
}

void ThreadStates::on_thread_exit(void* pointer) noexcept {
  auto* entry = static_cast<Entry*>(pointer);
  // Destructors of other keys may call Python, too. Set the key again, so that this is called once
  // more after them.
  if (!std::exchange(entry->was_called, true) &&
      pthread_setspecific(key_with(&on_thread_exit), entry) == 0) {
    return;
  }
  entry->next = ended_.load(std::memory_order_relaxed);
  while (!ended_.compare_exchange_weak(entry->next, entry, std::memory_order_release,
                                       std::memory_order_relaxed)) {
  }
}

void ThreadStates::delete_ended() noexcept {
  Entry* const all = ended_.exchange(nullptr, std::memory_order_acquire);
  if (all == nullptr) return;
  // Frees the threads' Python objects, which may run any code. So this comes before anything is
  // deleted.
  for (Entry* entry = all; entry != nullptr; entry = entry->next) PyThreadState_Clear(entry->state);
#if PY_VERSION_HEX >= 0x030C0000
  // From 3.12 on, deleting a state makes the *deleting* thread forget its own state
  // (`unbind_gilstate_tstate`). PyGILState_Ensure would then create another one, and wait for the
  // GIL that this thread has. A state that is not bound to its thread is bound when it becomes
  // current. So a temporary state becomes current first, and is bound instead of our own. Deleting
  // the others unbinds only the temporary one, which is deleted last. Then our own becomes current,
  // and is bound again.
  PyThreadState* const own = PyThreadState_Get();
  PyThreadState* const other = PyThreadState_New(PyThreadState_GetInterpreter(own));
  if (other == nullptr) return;  // no memory: the states stay, with nothing in them
  PyThreadState_Swap(other);
#endif
  for (Entry* entry = all; entry != nullptr;) {
    PyThreadState_Delete(entry->state);
    delete std::exchange(entry, entry->next);
  }
#if PY_VERSION_HEX >= 0x030C0000
  PyThreadState_Clear(other);
  PyThreadState_DeleteCurrent();
  PyEval_RestoreThread(own);
#endif
}

}  // namespace opgraft
