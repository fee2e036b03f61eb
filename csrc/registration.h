// Our kernels at the dispatcher, and ops of others that may be destroyed.
//
// Note [Ops that are destroyed]
// A library may destroy its op, and define it again, as a notebook's cell does that runs a second
// time. A kernel of ours at the op keeps the op's entry in the dispatcher, and has copies of the
// op's kernels. So a router is outdated from then on. It is taken off the dispatcher soon, by the
// main thread, before the op is defined again if that thread is the one that defines it; or by a
// call of the new op. With the entry goes what others keep in it, such as torch's Python objects.
// A handle of the op is valid no longer.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

namespace opgraft {

// Where our kernels are registered, according to torch's messages.
extern const char* const kOrigin;

// A kernel of ours at an op and dispatch key.
//
// Its owner lives until the process ends: the dispatcher may be destroyed before our statics.
class Registration {
 public:
  Registration(const c10::OperatorHandle& op, c10::DispatchKey key, c10::KernelFunction kernel,
               std::optional<c10::impl::CppSignature> signature = std::nullopt);

  // Calls that are in the kernel go on.
  void remove() { handle_.reset(); }

 private:
  c10::KernelFunction kernel_;
  std::optional<c10::RegistrationHandleRAII> handle_;
};

// Calls `tell` once, when the op of this name is destroyed. The dispatcher calls it under its lock:
// it must neither use the dispatcher nor wait for the GIL.
void when_destroyed(const c10::OperatorName& name, std::function<void()> tell);

// An op for which others call by its name, whichever definition of it there is.
class NamedOp {
 public:
  explicit NamedOp(const c10::OperatorHandle& op);

  // Throws if there is no such op any more, or one with another schema.
  const c10::OperatorHandle& get() const {
    const auto* found = state_->op.load(std::memory_order_acquire);
    return C10_LIKELY(found != nullptr) ? *found : look_up();
  }

 private:
  struct State {
    std::atomic<const c10::OperatorHandle*> op{nullptr};  // never destroyed; null: look it up
  };

  const c10::OperatorHandle& look_up() const;
  const c10::OperatorHandle& keep(const c10::OperatorHandle& op) const;

  c10::OperatorName name_;
  c10::FunctionSchema schema_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace opgraft
