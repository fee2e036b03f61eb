// Python's states of threads that C++ made: kept while such a thread lives, so that its calls of
// Python do not make one each (10 us), and deleted by somebody else after it has ended.
//
// Note [Thread states]
// A state can be deleted only with the GIL. A thread that asked for the GIL when it ends would
// deadlock with whoever joins it and holds the GIL meanwhile, as an extension may that knows its
// threads for pure C++. So a thread that ends leaves its state in a list, and the next one that has
// the GIL for us deletes what it finds there.
//
// The list is filled by the destructor of a pthread key and not of a thread_local: these run after
// all of C++'s, which may still call Python, and find the state as Python's own key has it.
#pragma once

#include <Python.h>

#include <atomic>

namespace opgraft {

class ThreadStates {
 public:
  // Makes this thread's, which has none and does not hold the GIL, and keeps it until the thread
  // ends.
  static void keep();

  // Whether there are some of threads that have ended.
  static bool any_ended() noexcept { return ended_.load(std::memory_order_relaxed) != nullptr; }

  // Deletes those. Needs the GIL, which it may give up in between, as freeing what threads kept in
  // Python may.
  static void delete_ended() noexcept;

  // In the child of a fork: Python deletes the states of threads that are not there.
  static void forget() noexcept { ended_.store(nullptr, std::memory_order_relaxed); }

 private:
  struct Kept;

  static void hand_over(void* kept) noexcept;

  static inline std::atomic<Kept*> ended_{nullptr};
};

}  // namespace opgraft
