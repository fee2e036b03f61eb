// What a thread is in the middle of: which impls it runs, and which overrides are off for it; and what
// becomes of all that in the child of a fork.
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
class Scope {
 public:
  // Without a selector nothing is off, and calls are observed.
  explicit Scope(std::optional<Selector> selector);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  void enter();
  void exit();

  // Whether this thread may be in a scope: exact as soon as there is one anywhere.
  static bool any() noexcept {
    return C10_UNLIKELY(alive_.load(std::memory_order_relaxed) > 0) && any_here();
  }
  static bool is_off(const Selector& override);
  static bool is_observed() noexcept;

 private:
  struct State;
  struct Active;

  static bool any_here() noexcept;
  static const Active* current() noexcept;

  // How many scopes are open, on any thread. Whoever inherits one was told so by the thread that opened
  // it, and so sees that it is counted.
  static inline std::atomic<int64_t> alive_{0};

  std::unique_ptr<State> state_;
};

// Makes forks safe, once and for good: a child has the thread that forked and no other.
void mind_forks();

}  // namespace opgraft
