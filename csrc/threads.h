// The state of a thread: which impls it is running, and which overrides are off for it. Also fork
// handlers for the core's state.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace opgraft {

class Router;

// While it lives, a router, or every router of an op, is bypassed on this thread. Frames nest.
class Frame {
 public:
  explicit Frame(const Router* router) noexcept;
  explicit Frame(std::string op);
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // Whether there is a frame on this thread.
  static bool any() noexcept { return innermost_ != nullptr; }

  // Whether calls of `router`, which routes `op`, run the native kernel on this thread.
  static bool bypasses(const Router* router, const std::string& op) noexcept {
    return C10_UNLIKELY(innermost_ != nullptr) && any_bypasses(router, op);
  }

  // Notes what the native kernel returned to the impl of `router` that is running on this thread.
  static void note_native(const Router* router, const torch::jit::Stack& stack, size_t outputs);

  // Whether the impl returned what native returned to it. Results are the last `outputs` values of
  // the stack.
  bool ended_in_native(const torch::jit::Stack& stack, size_t outputs) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static bool any_bypasses(const Router* router, const std::string& op) noexcept;

  static inline thread_local Frame* innermost_ __attribute__((tls_model("initial-exec"))) = nullptr;

  const Router* router_ = nullptr;
  std::string op_;
  Frame* outer_;
  // Weak, because an impl may get many native results, and this must keep none alive.
  std::vector<std::vector<WeakTensor>> native_results_;
};

// Selects the overrides that match every given field. An empty text is that of an override that has
// none: without a pack, a user's own.
struct Selector {
  std::optional<std::string> dsl, op, dispatch_key, pack, name;

  // `other`: an override's identity. A field is empty if the override has none.
  bool matches(const Selector& other) const;
};

// A scope in which overrides are off, or routing is observed. It applies to its thread, and to the
// autograd engine's threads for a backward that is started inside it.
//
// Note [Scopes]
// The scopes that a thread is in are a list in torch's thread-local state, under a key of ours.
// torch copies that state to all threads that work for the thread, above all the autograd engine's.
// Nothing else is under the key, such as a profiler's state, that would have to end in order. A
// list is never changed, only replaced.
//
// Scopes end in any order, and on any thread: generators and asyncio tasks are interleaved, and
// another thread than the one that started a generator may close it. So a scope that ends is marked
// as closed in its one entry, which all lists share. A closed entry has no effect in any list.
// Entering or leaving a scope on a thread removes closed entries from that thread's list. So a list
// that torch has copied and restores later, as the engine does, cannot reopen a scope.
//
// torch stores Python objects there, and frees them with the GIL. Our object holds no Python
// object, so a thread that ends does not request the GIL.
class Scope {
 public:
  // `off`: what is off inside; nullopt: nothing is, and calls are observed. `tag`: identifies the
  // scope in `tags`.
  Scope(std::optional<Selector> off, std::shared_ptr<const void> tag);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  void enter();
  // May be called on any thread, and any number of times.
  void exit();

  // Whether this thread is in a scope, perhaps a closed one. Cheap if no scope is open anywhere.
  static bool any() noexcept { return C10_UNLIKELY(any_anywhere()) && any_on_this_thread(); }
  // Whether a scope is open on any thread.
  static bool any_anywhere() noexcept { return open_.load(std::memory_order_relaxed) > 0; }
  static bool is_off(const Selector& override);
  static bool is_observed() noexcept;
  // The tags of this thread's scopes, outermost first: of those that observe, or of those that
  // switch something off.
  static std::vector<std::shared_ptr<const void>> tags(bool observing);

 private:
  struct Entry;
  struct ScopeList;

  static bool any_on_this_thread() noexcept;
  static const ScopeList* current_list() noexcept;
  static void forget_closed();
  void close() noexcept;

  // The number of open scopes on all threads. A thread that inherits a scope gets it from the
  // thread that opened it, so it sees the count. The child of a fork may count scopes of threads
  // that it does not have, which only costs time.
  static inline std::atomic<int64_t> open_{0};

  std::optional<Selector> off_;
  std::shared_ptr<const void> tag_;
  std::shared_ptr<Entry> entry_;
};

// Installs handlers that make forks safe, once per process. A child has only the thread that
// forked.
void install_fork_handlers();

}  // namespace opgraft
