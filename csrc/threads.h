// What a thread is in the middle of: which impls it runs, and which overrides are off for it; and
// what becomes of all that in the child of a fork.
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

// While it lives, a router (or every router of an op) is bypassed on this thread. Frames nest.
class Frame {
 public:
  explicit Frame(const Router* router) noexcept;
  explicit Frame(std::string op);
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // Whether calls of `router`, which routes `op`, mean the native kernel on this thread.
  static bool bypasses(const Router* router, const std::string& op) noexcept {
    return C10_UNLIKELY(innermost_ != nullptr) && any_bypasses(router, op);
  }

  // Tells the impl of `router` that runs on this thread what the native kernel returned to it.
  static void note_native(const Router* router, const torch::jit::Stack& stack, size_t outputs);

  // Whether the impl handed on, as `outputs` last values of the stack, what native returned to it.
  bool ended_in_native(const torch::jit::Stack& stack, size_t outputs) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static bool any_bypasses(const Router* router, const std::string& op) noexcept;

  static inline thread_local Frame* innermost_ __attribute__((tls_model("initial-exec"))) = nullptr;

  const Router* router_ = nullptr;
  std::string op_;
  Frame* outer_;
  // Weak: an impl may go through many native results, and none is kept alive for our sake.
  std::vector<std::vector<WeakTensor>> native_;
};

// Which overrides a scope speaks of: those that equal every field that is given.
struct Selector {
  std::optional<std::string> dsl, op, dispatch_key, pack, name;

  // `other` has every field given, or empty where an override has none.
  bool matches(const Selector& other) const;
};

// A scope in which overrides are off, or routing is observed: on its thread, and in the autograd
// engine's threads for a backward that is started inside it.
//
// Note [Scopes]
// The scopes that a thread is in are a list in torch's own thread-local state, under a key of ours:
// torch copies that state to whatever works for the thread, the autograd engine's threads first of
// all, and nothing else is under the key, such as a profiler's state, that would have to end in
// order. A list is never changed, only replaced.
//
// Scopes end in any order, and on any thread: generators and asyncio's tasks take turns, and
// whoever closes a generator need not be who began it. So a scope that has ended is marked, in the
// one entry that all lists share, and a marked entry means nothing, wherever it stands. Whoever
// enters or leaves a scope on a thread takes the marked ones out of that thread's list. A list that
// torch has copied and puts back later, as the engine does, can so bring nothing back to life.
//
// torch keeps Python objects there, and frees them with the GIL. Ours is none inside, so that a
// thread that ends asks nobody for the GIL.
class Scope {
 public:
  // `off`: what is off inside; without one nothing is, and calls are observed. `tag`: what the
  // scope is known by to whoever asks `tags`.
  Scope(std::optional<Selector> off, std::shared_ptr<const void> tag);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  void enter();
  // Anywhere, and as often as anybody likes.
  void exit();

  // Whether this thread may be in a scope: exact as soon as there is one anywhere.
  static bool any() noexcept {
    return C10_UNLIKELY(open_.load(std::memory_order_relaxed) > 0) && any_here();
  }
  static bool is_off(const Selector& override);
  static bool is_observed() noexcept;
  // Of the scopes that this thread is in, the outermost first: of those where something is off, or
  // of those that observe.
  static std::vector<std::shared_ptr<const void>> tags(bool observing);

 private:
  struct Entry;
  struct Here;

  static bool any_here() noexcept;
  static const Here* here() noexcept;
  static void forget_closed();
  void close() noexcept;

  // How many scopes are open, on any thread. Whoever inherits one was told so by the thread that
  // opened it, and so sees that it is counted. The child of a fork may count those of threads that
  // it has not, which costs it time, and nothing else.
  static inline std::atomic<int64_t> open_{0};

  std::optional<Selector> off_;
  std::shared_ptr<const void> tag_;
  std::shared_ptr<Entry> entry_;
};

// Makes forks safe, once and for good: a child has the thread that forked and no other.
void mind_forks();

}  // namespace opgraft
