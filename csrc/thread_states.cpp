#include "thread_states.h"

#include <pthread.h>

#include <new>
#include <utility>

namespace opgraft {

struct ThreadStates::Kept {
  PyThreadState* state = nullptr;
  bool was_called = false;
  Kept* next = nullptr;
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

void ThreadStates::keep() {
  // Never released: what anybody ensures later is nested in this, and leaves the state where it is.
  PyGILState_Ensure();
  auto* kept = new (std::nothrow) Kept;
  PyThreadState* state = PyEval_SaveThread();
  if (kept == nullptr) return;
  kept->state = state;
  // Where that fails the state stays until Python ends, which takes all of them away.
  if (pthread_setspecific(key_with(&hand_over), kept) != 0) delete kept;
}

void ThreadStates::hand_over(void* pointer) noexcept {
  auto* kept = static_cast<Kept*>(pointer);
  // Destructors of other keys may call Python, too: they come first, this is called once more.
  if (!std::exchange(kept->was_called, true) &&
      pthread_setspecific(key_with(&hand_over), kept) == 0) {
    return;
  }
  kept->next = ended_.load(std::memory_order_relaxed);
  while (!ended_.compare_exchange_weak(kept->next, kept, std::memory_order_release,
                                       std::memory_order_relaxed)) {
  }
}

void ThreadStates::delete_ended() noexcept {
  Kept* const all = ended_.exchange(nullptr, std::memory_order_acquire);
  if (all == nullptr) return;
  // Frees what the threads kept in Python, which may run any code: all of it before the rest.
  for (Kept* kept = all; kept != nullptr; kept = kept->next) PyThreadState_Clear(kept->state);
#if PY_VERSION_HEX >= 0x030C0000
  // From 3.12 on deleting a state makes the *deleting* thread forget which state is its own
  // (`unbind_gilstate_tstate`), so that PyGILState_Ensure would make it another one, and wait for
  // the GIL that it has. A state learns that it is its thread's when it becomes current and is not
  // known as such. So another one becomes current, by which this thread's own is not known any
  // more, is what deleting makes forget, and goes; then our own is current again, and known.
  PyThreadState* const own = PyThreadState_Get();
  PyThreadState* const other = PyThreadState_New(PyThreadState_GetInterpreter(own));
  if (other == nullptr) return;  // no memory: they stay, with nothing in them
  PyThreadState_Swap(other);
#endif
  for (Kept* kept = all; kept != nullptr;) {
    PyThreadState_Delete(kept->state);
    delete std::exchange(kept, kept->next);
  }
#if PY_VERSION_HEX >= 0x030C0000
  PyThreadState_Clear(other);
  PyThreadState_DeleteCurrent();
  PyEval_RestoreThread(own);
#endif
}

}  // namespace opgraft
