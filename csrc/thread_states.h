// Python thread states for threads that C++ created. A state lives as long as its thread, because
// creating one for each call takes 10 us. Another thread deletes it after the thread has ended.
//
// Note [Thread states]
// A state can be deleted only with the GIL. A thread that requests the GIL as it ends would
// deadlock with a thread that joins it while holding the GIL, as an extension may do whose threads
// are pure C++. So a thread that ends puts its state on a list, and the next thread of ours that
// has the GIL deletes the states on it.
//
// The destructor of a pthread key adds to the list, not one of a thread_local. Those of pthread
// keys run after all C++ destructors, which may still call Python with the state.
#pragma once

#include <Python.h>

#include <atomic>

namespace opgraft {

class ThreadStates {
 public:
  // Creates this thread's state, which lives until the thread ends. The thread must have none, and
  // not hold the GIL.
  static void create();

  // Whether there are states of ended threads.
  static bool any_ended() noexcept { return ended_.load(std::memory_order_relaxed) != nullptr; }

  // Deletes them. Needs the GIL, and may release it in between, as freeing Python objects may.
  static void delete_ended() noexcept;

  // Called in the child of a fork, where Python itself deletes the states of the other threads.
  static void forget() noexcept { ended_.store(nullptr, std::memory_order_relaxed); }

 private:
  struct Entry;

  static void on_thread_exit(void* entry) noexcept;

  static inline std::atomic<Entry*> ended_{nullptr};
};

}  // namespace opgraft
