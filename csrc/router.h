// The router: our kernel at one op and dispatch key.
//
// It reads an immutable chain through an atomic pointer, evaluates conditions on a view of the
// arguments, on a miss calls the captured native kernel, on a hit an impl. The miss path takes no
// lock, allocates nothing and never asks for the GIL: Note [Epochs]. Calls come in boxed, or, for
// the signatures that csrc/signatures.h lists, as the C++ arguments that they are; those are boxed
// once somebody may want the call: Note [Typed calls].
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "argument.h"
#include "composite.h"
#include "condition.h"
#include "counter.h"
#include "threads.h"

namespace opgraft {

class Override;
struct PlanEntry;

// One call as the router sees it: the arguments are the last ones of the stack.
struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keyset;
  torch::jit::Stack& stack;
  size_t arguments;
  // What an impl's own calls do not pass: it runs as a kernel at the router's key would.
  c10::DispatchKeySet excluded{};
  const Override* ran = nullptr;  // whose impl runs, or ran
  bool fell_back = false;         // and handed on what the native kernel returned to it

  const c10::IValue* begin() const { return stack.data() + stack.size() - arguments; }
  const c10::IValue* end() const { return stack.data() + stack.size(); }
  Arguments view() const { return opgraft::view(c10::ArrayRef<c10::IValue>(begin(), end())); }

  // The keys that an impl gets, which has passed those that are excluded.
  c10::DispatchKeySet impl_keyset() const {
    const bool below = excluded.has(c10::DispatchKey::ADInplaceOrView);
    return below ? keyset & c10::after_ADInplaceOrView_keyset : keyset;
  }

  // Puts results in the arguments' place.
  template <class Results>
  void answer(Results&& results) {
    torch::jit::drop(stack, arguments);
    for (c10::IValue& result : results) stack.push_back(std::move(result));
  }
};

// What an override runs: replaces the call's arguments on the stack by its results.
class Impl {
 public:
  virtual ~Impl() = default;

  // Returns false, the stack untouched, where it declines after all.
  virtual bool run(const Override& override, Call& call, c10::Device device) = 0;

  // Whether the impl wants a call that the compiled condition cannot decide.
  virtual bool wants(const Override& override, Call& call) = 0;

  // From now on it declines calls of this kind, as it failed for one. False: it cannot tell kinds
  // apart.
  virtual bool quarantine(const Call&) { return false; }
  virtual bool is_quarantined(const Call&) { return false; }
  virtual bool has_quarantined() { return false; }

  // What an impl that has plans makes of a call before that is boxed. The condition's first tests
  // have passed; `holds`: the rest, too, else it is for the impl to ask. Inside of an epoch.
  struct Early {
    enum class Kind : uint8_t { Takes, Declines, Replays };
    Kind kind = Kind::Takes;
    const PlanEntry* entry = nullptr;  // what is replayed
  };
  virtual Early early(const Override&, c10::ArrayRef<Argument>, bool /*holds*/) {
    TORCH_INTERNAL_ASSERT(false, "this impl has no plans");
  }
  // Adds the results to an empty stack; false where it could not, and nothing happened.
  virtual bool replay_early(const Override&, const PlanEntry&, const Argument*,
                            torch::jit::Stack&) {
    return false;
  }
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
class alignas(64) Override {
 public:
  // What every call reads comes first, in one cache line.
  std::atomic<bool> asks{false};  // the impl must be asked: a condition in Python, a quarantine
  // Whether the impl has launch plans now; null where it is one that never has any. One that may is
  // asked before a call is boxed: `Impl::early`.
  const std::atomic<bool>* has_plans = nullptr;
  std::shared_ptr<Counter> misses;
  Condition condition;  // every call's, unless it is set
  std::shared_ptr<Counter> hits, fallbacks;
  std::unique_ptr<Impl> impl;
  Selector identity;
  std::string label;  // what a profile shows
  // Stands for overrides that are registered once a call comes by: whoever is asked (`Impl::wants`)
  // says whether the chain is another one by then, and the call is routed anew.
  bool is_placeholder = false;
};

using Chain = std::vector<std::shared_ptr<const Override>>;

// Told of every call on a thread that observes routing (`Scope::is_observed`).
class Observer {
 public:
  virtual ~Observer() = default;

  // Calls `route`, once. `kept`: the call keeps the derivative of a composite op, no override is
  // asked.
  virtual void observe(Call& call, bool kept, const std::function<void()>& route) = 0;

  // Replaces the arguments of a composite op's call by the results of what stands for the composite
  // in Python; false where nothing does.
  virtual bool decompose(Call& call) = 0;
};

// What an op ran at a dispatch key before us, by value: it outlives whoever registered it.
class NativeKernel {
 public:
  NativeKernel(const c10::OperatorHandle& op, c10::DispatchKey key);

  const std::string& origin() const noexcept { return origin_; }
  // As the dispatcher had it; an invalid one where there was none.
  const c10::KernelFunction& function() const noexcept { return kernel_; }
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
            torch::jit::Stack* stack) const {
    if (C10_UNLIKELY(!kernel_.isValid())) missing(op);
    kernel_.callBoxed(op, keyset, stack);
  }

 private:
  [[noreturn]] void missing(const c10::OperatorHandle& op) const;

  c10::KernelFunction kernel_;
  std::string origin_;
  c10::DispatchKey key_;
};

// A call that the native kernel is not all there is to: where its routing ended.
struct Pending {
  enum class End : uint8_t {
    Taken,  // at an override that may take it; those behind it are asked if it declines after all
    Replayed,      // at a launch plan, which has been replayed
    Bypassed,      // nobody is asked: this thread said so, and wants to know what native returns
    Observed,      // the observer is to be told of the call, and it is routed then
    ObservedLeft,  // the same, and the composite has the call, whatever the conditions say
    ObservedKept,  // the same, since the composite's derivative is to be kept
    Whole,         // a tracer wants to see the op as it is: the call goes on below autograd
  };
  End end = End::Taken;
  torch::jit::Stack results;  // where it was replayed
  bool holds = false;         // the condition of the first of `rest` does
  c10::Device device{c10::DeviceType::CPU};
  Chain rest;  // the first override that may take the call, and those behind it

  ~Pending();
};

class alignas(64) Router {
 public:
  // Puts the router, and for a composite op its companion, at the dispatcher, for good.
  static std::shared_ptr<Router> install(const std::string& name, const std::string& overload,
                                         const std::string& dispatch_key,
                                         std::unique_ptr<Observer> observer);

  void publish(Chain chain);

  // A boxed call; `at_autograd`: of a composite op, at the autograd key.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack, bool at_autograd);

  // Null where every override declines, which is counted then: the native kernel is to run.
  // `observed`: the call is being told to the observer already.
  [[gnu::hot]] std::unique_ptr<Pending> pending(const Argument* arguments,
                                                bool observed = false) const;

  // The same for a composite op at the autograd key.
  [[gnu::hot]] std::unique_ptr<Pending> pending_at_autograd(const Argument* arguments,
                                                            c10::DispatchKeySet keyset) const;

  // Runs who takes the call, or the native kernel: results replace the arguments on the stack.
  // `observed`: the call is being told to the observer already.
  void finish(Pending& pending, Call& call, bool observed = false);

  const NativeKernel& native() const noexcept { return native_; }
  // What a call with these keys runs without us: at the autograd key that is the composite there.
  const NativeKernel& native(c10::DispatchKeySet keyset) const noexcept {
    return composite_ && keyset.has_any(c10::autograd_dispatch_keyset) ? *composite_ : native_;
  }
  // What the calls of an impl do not pass: it runs as a kernel at the router's key would.
  c10::DispatchKeySet excluded() const noexcept { return excluded_; }
  bool is_composite() const noexcept { return composite_.has_value(); }
  const NativeKernel& composite() const { return composite_.value(); }
  const c10::OperatorHandle& op() const noexcept { return op_; }
  size_t arguments() const noexcept { return arguments_; }
  size_t outputs() const noexcept { return outputs_; }
  // Whether calls come as C++ arguments, and are boxed only where somebody may want them.
  bool is_typed() const noexcept { return typed_; }

  // From now on every call is a miss: the interpreter is going away, and a thread that asks it for
  // the GIL then is ended in the middle of C++. Waits for those that are in Python, up to two
  // seconds.
  static void shut_down() noexcept;

  // In the child of a fork: nobody else is in Python any more.
  static void forget_other_threads() noexcept;

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
  C10_NOINLINE static std::unique_ptr<Pending> ended(Pending::End end);
  C10_NOINLINE static std::unique_ptr<Pending> taken(const Chain& chain, size_t first, bool holds,
                                                     c10::Device device);
  C10_NOINLINE static void count_misses(const Chain& chain);
  C10_NOINLINE void count_misses() const;
  // Null where the override declines.
  C10_NOINLINE std::unique_ptr<Pending> taken_early(const Chain& chain, size_t index,
                                                    const Argument* arguments, bool holds,
                                                    c10::Device device) const;
  C10_NOINLINE c10::Device device_without_tensors(const Argument* arguments) const;
  bool replay_early(const Override& override, const PlanEntry& entry, const Argument* arguments,
                    torch::jit::Stack& results) const;
  // What a call runs without us.
  void run_native(Call& call) const;
  void route(Call& call, bool observed);
  bool try_rest(const Pending& pending, Call& call, bool observed);
  bool takes(const Override& override, Call& call);
  bool run(const Override& override, Call& call, c10::Device device);
  // None where the keys that the call has passed keep the books.
  std::optional<Bookkeeping> bookkeeping(c10::ArrayRef<Argument> arguments) const;

  // What a miss reads comes first, in one cache line.
  std::atomic<const Chain*> chain_{nullptr};  // null: empty
  size_t arguments_;
  NativeKernel native_;
  c10::OperatorHandle op_;
  size_t outputs_;
  std::string name_;
  c10::DispatchKey key_;
  c10::DeviceType device_type_;
  std::optional<NativeKernel> composite_;  // what a composite op runs at the autograd key
  bool writes_or_aliases_ = false;
  c10::DispatchKeySet excluded_;
  std::unique_ptr<Observer> observer_;
  bool typed_ = false;
};

// A router as the dispatcher has it, at its own key or, for a composite op, at the autograd key.
struct RouterKernel final : c10::OperatorKernel {
  RouterKernel(Router& router, bool at_autograd)
      : router(router),
        native(at_autograd ? router.composite() : router.native()),
        at_autograd(at_autograd) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    router(op, keyset, stack, at_autograd);
  }
  std::unique_ptr<Pending> pending(const Argument* arguments, c10::DispatchKeySet keyset) const {
    if (C10_UNLIKELY(at_autograd)) return router.pending_at_autograd(arguments, keyset);
    return router.pending(arguments);
  }
  Router& router;
  const NativeKernel& native;
  bool at_autograd;
};

// Where the routers say that they were registered, in torch's own messages.
extern const char* const kOrigin;

}  // namespace opgraft
