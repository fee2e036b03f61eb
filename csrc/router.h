// The router: our boxed kernel at one op and dispatch key.
//
// It reads an immutable chain through an atomic pointer, evaluates conditions on the IValue stack, on a
// miss calls the captured native kernel, on a hit an impl. The miss path takes no lock, allocates
// nothing and never asks for the GIL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "condition.h"
#include "counter.h"
#include "threads.h"

namespace opgraft {

class Override;

// One call as the router sees it: the arguments are the last ones of the stack.
struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keyset;
  torch::jit::Stack& stack;
  size_t arguments;
  const Override* ran = nullptr;  // whose impl runs, or ran
  bool fell_back = false;         // and handed on what the native kernel returned to it

  const c10::IValue* begin() const { return stack.data() + stack.size() - arguments; }
  const c10::IValue* end() const { return stack.data() + stack.size(); }
};

// What an override runs: replaces the call's arguments on the stack by its results.
class Impl {
 public:
  virtual ~Impl() = default;

  // Returns false, the stack untouched, where it declines after all.
  virtual bool run(const Override& override, Call& call, c10::Device device) = 0;

  // Whether the impl wants a call that the compiled condition cannot decide.
  virtual bool wants(const Override& override, Call& call) = 0;
};

// An impl in C++: a boxed function that replaces the arguments on the stack by results.
class BoxedImpl final : public Impl {
 public:
  using Function = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);
  explicit BoxedImpl(Function function) : function_(function) {}

  bool run(const Override& override, Call& call, c10::Device device) override;
  bool wants(const Override&, Call&) override { return true; }

 private:
  Function function_;
};

// One override of a chain. Immutable, but for its counters and `asks`.
class Override {
 public:
  // What every call reads comes first, in as few cache lines as it takes.
  std::atomic<bool> asks{false};       // the impl must be asked: a condition in Python, a quarantine
  std::optional<Condition> condition;  // none: every call, or the impl is asked (`asks`)
  std::shared_ptr<Counter> misses, hits, fallbacks;
  std::unique_ptr<Impl> impl;
  Selector identity;
  std::string label;  // what a profile shows
};

using Chain = std::vector<std::shared_ptr<const Override>>;

// Told of every call on a thread that observes routing (`Scope::is_observed`).
class Observer {
 public:
  virtual ~Observer() = default;

  // Calls `route`, once. `kept`: the call keeps the derivative of a composite op, no override is asked.
  virtual void observe(Call& call, bool kept, const std::function<void()>& route) = 0;
};

// What an op ran at a dispatch key before us, by value: it outlives whoever registered it.
class NativeKernel {
 public:
  NativeKernel(const c10::OperatorHandle& op, c10::DispatchKey key);

  bool exists() const noexcept { return kernel_.has_value(); }
  const std::string& origin() const noexcept { return origin_; }
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
            torch::jit::Stack* stack) const {
    if (C10_UNLIKELY(!kernel_)) missing(op);
    kernel_->callBoxed(op, keyset, stack);
  }

 private:
  [[noreturn]] void missing(const c10::OperatorHandle& op) const;

  std::optional<c10::KernelFunction> kernel_;
  std::string origin_;
  c10::DispatchKey key_;
};

class Router {
 public:
  // Puts the router, and for a composite op its companion, at the dispatcher, for good.
  static std::shared_ptr<Router> install(const std::string& name, const std::string& overload,
                                         const std::string& dispatch_key,
                                         std::unique_ptr<Observer> observer);

  void publish(Chain chain);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack);

  const NativeKernel& native() const noexcept { return native_; }
  bool is_composite() const noexcept { return composite_.has_value(); }
  const c10::OperatorHandle& op() const noexcept { return op_; }
  size_t arguments() const noexcept { return arguments_; }
  size_t outputs() const noexcept { return outputs_; }

  // The autograd key of a composite op: what must be differentiated goes to the composite.
  void differentiate(c10::DispatchKeySet keyset, torch::jit::Stack* stack);

  // From now on every call is a miss: the interpreter is going away, and a thread that asks it for the
  // GIL then is ended in the middle of C++. Waits for those that are in Python, up to two seconds.
  static void shut_down() noexcept;

  // Held by whoever goes to Python for a call; `allowed()` is false once that is too late.
  class InPython {
   public:
    InPython() noexcept;
    ~InPython();
    InPython(const InPython&) = delete;
    InPython& operator=(const InPython&) = delete;
    bool allowed() const noexcept { return allowed_; }

   private:
    bool allowed_;
  };

  Router(c10::OperatorHandle op, c10::DispatchKey key, std::unique_ptr<Observer> observer);

 private:
  bool try_chain(Call& call, bool observed = false);
  C10_NOINLINE void observe(Call& call);
  bool takes(const Override& override, Call& call);
  bool run(const Override& override, Call& call, c10::Device device);

  c10::OperatorHandle op_;
  std::string name_;
  c10::DispatchKey key_;
  size_t arguments_;
  size_t outputs_;
  NativeKernel native_;
  std::optional<NativeKernel> composite_;
  std::unique_ptr<Observer> observer_;
  std::atomic<const Chain*> chain_{nullptr};
};

// Where the routers say that they were registered, in torch's own messages.
extern const char* const kOrigin;

}  // namespace opgraft
