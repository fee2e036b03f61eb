// The router: our kernel at one op and dispatch key.
//
// It reads an immutable chain through an atomic pointer, and evaluates conditions on a view of the
// arguments. On a miss it calls the captured native kernel, on a hit an impl. A miss takes no lock,
// allocates nothing and needs no GIL: Note [Epochs]. Calls arrive boxed, or, for the signatures in
// csrc/signatures.h, as C++ arguments. Those are boxed only if an override may take the call: Note
// [Typed calls].
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "argument.h"
#include "composite.h"
#include "condition.h"
#include "counter.h"
#include "registration.h"
#include "threads.h"

namespace opgraft {

class Derivative;
class Override;
struct PlanEntry;

// A call in the router. The arguments are the last values of the stack.
struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keyset;
  torch::jit::Stack& stack;
  size_t argument_count;
  // The keys to exclude while an impl runs, so that it runs as a kernel at the router's key does.
  c10::DispatchKeySet excluded{};
  const Override* ran = nullptr;  // the override whose impl runs or ran
  bool fell_back = false;         // the impl returned what the native kernel returned to it
  // The impl that declined has native run the call: nobody behind it is asked.
  bool wants_native = false;

  const c10::IValue* begin() const { return stack.data() + stack.size() - argument_count; }
  const c10::IValue* end() const { return stack.data() + stack.size(); }
  Arguments view() const { return opgraft::view(c10::ArrayRef<c10::IValue>(begin(), end())); }

  // The keyset for an impl: the call's, without the keys that are excluded.
  c10::DispatchKeySet impl_keyset() const {
    const bool below = excluded.has(c10::DispatchKey::ADInplaceOrView);
    return below ? keyset & c10::after_ADInplaceOrView_keyset : keyset;
  }

  // Replaces the arguments on the stack by results.
  template <class Results>
  void set_results(Results&& results) {
    torch::jit::drop(stack, argument_count);
    for (c10::IValue& result : results) stack.push_back(std::move(result));
  }
};

// What an override runs. It replaces the arguments on the stack by results.
class Impl {
 public:
  virtual ~Impl() = default;

  // Returns false, with the stack unchanged, if it declines after all.
  virtual bool run(const Override& override, Call& call, c10::Device device) = 0;

  // Whether it takes a call, if the compiled condition cannot decide that.
  virtual bool takes(const Override& override, Call& call) = 0;

  // Makes it decline calls of this kind, because it failed for one. False if it does not know
  // kinds.
  virtual bool quarantine(const Call&) { return false; }
  virtual bool is_quarantined(const Call&) { return false; }
  virtual bool has_quarantined() { return false; }

  // The decision of an impl with plans on a call that is not boxed yet. The condition's quick tests
  // have passed. `condition_holds`: so have the others; if not, the impl must evaluate them. Called
  // inside an epoch.
  struct UnboxedDecision {
    enum class Kind : uint8_t { Takes, Declines, Replays };
    Kind kind = Kind::Takes;
    const PlanEntry* entry = nullptr;  // the plan to replay
  };
  virtual UnboxedDecision decide_unboxed(const Override&, c10::ArrayRef<Argument>,
                                         bool /*condition_holds*/) {
    TORCH_INTERNAL_ASSERT(false, "this impl has no plans");
  }
  // Replays a plan, and pushes the results on an empty stack. False if it could not, and nothing
  // happened.
  virtual bool replay_unboxed(const Override&, const PlanEntry&, const Argument*,
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
  bool takes(const Override&, Call&) override { return true; }

 private:
  Function function_;
};

// One override of a chain. Immutable, except for its counters and `decides_in_python`.
class alignas(64) Override {
 public:
  // The members that a call reads come first, in one cache line.
  // Whether `Impl::takes` decides: for a condition in Python, or a quarantine.
  std::atomic<bool> decides_in_python{false};
  // Whether the impl has launch plans now; null if it never has any. An impl that may have some
  // decides before a call is boxed: `Impl::decide_unboxed`.
  const std::atomic<bool>* has_plans = nullptr;
  std::shared_ptr<Counter> misses;
  Condition condition;  // holds for every call, unless set
  std::shared_ptr<Counter> hits, fallbacks;
  std::unique_ptr<Impl> impl;
  Selector identity;
  std::string label;  // its name in profiles
  // Stands for deferred overrides, which the first call registers. `Impl::takes` returns whether
  // the chain has changed by then, and the call is routed again.
  bool is_placeholder = false;
  // Autograd differentiates the ops that its impl calls. The op is composite.
  bool is_differentiated = false;
  // Two functions differentiate it: see `Derivative`.
  bool has_functions = false;
  // Whether a result of such an impl had a derivative. Some ops' have none.
  mutable std::atomic<bool> has_made_derivative{false};
};

using Overrides = std::vector<std::shared_ptr<const Override>>;

// The overrides of a router, in order, in the form that calls read. Immutable, except for its
// counter.
//
// Note [Misses]
// Nearly every call is a miss. What it reads is therefore here, side by side: a test that turns
// away what every override turns away, each override's own test of the same tensor, and one counter
// for all. A call that every override declines is counted once, in `misses`, which each override's
// counter includes. A call that some take or are not asked for is counted override by override.
class alignas(64) Chain {
 public:
  explicit Chain(Overrides overrides);
  ~Chain();
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  const Overrides& overrides() const { return overrides_; }
  size_t size() const { return overrides_.size(); }
  // Whether some have a derivative of their own.
  bool any_derivative() const { return any_derivative_; }
  const Override& operator[](size_t index) const { return *overrides_[index]; }

  // Fails only for calls for which every override's test fails.
  const TensorTest& common_test() const { return common_test_; }
  const TensorTest& tensor_test(size_t index) const { return tensor_tests_[index]; }
  void count_miss() const {
    if (C10_UNLIKELY(!count_miss_quickly())) misses_->add();
  }
  // False if this thread has not counted such misses before: then none was counted.
  bool count_miss_quickly() const { return C10_LIKELY(Counter::add_at(misses_place_)); }

 private:
  // What a miss reads, in one cache line.
  TensorTest common_test_;
  Counter::Place misses_place_;
  bool any_derivative_ = false;

  std::shared_ptr<Counter> misses_ = std::make_shared<Counter>();
  std::vector<TensorTest> tensor_tests_;
  Overrides overrides_;
};

// Is told of every call on a thread that observes routing (`Scope::is_observed`).
class Observer {
 public:
  virtual ~Observer() = default;

  // Calls `route`, once. `keeps_derivative`: autograd differentiates the call of a composite op, so
  // no override can take it.
  virtual void observe(Call& call, bool keeps_derivative, const std::function<void()>& route) = 0;

  // Runs a composite op's decomposition in Python, and replaces the arguments by the results. False
  // if there is none.
  virtual bool decompose(Call& call) = 0;
};

// The kernel that an op had at a dispatch key before the router, captured by value. It outlives its
// registration.
class NativeKernel {
 public:
  NativeKernel(const c10::OperatorHandle& op, c10::DispatchKey key);

  const std::string& origin() const noexcept { return origin_; }
  // Drops the kernel, with all that it holds. No call may be in it, or come.
  void drop() { kernel_ = c10::KernelFunction(); }
  // The dispatcher's kernel; invalid if there was none.
  const c10::KernelFunction& function() const noexcept { return kernel_; }
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
            torch::jit::Stack* stack) const {
    if (C10_LIKELY(kernel_.isValid()))
      kernel_.callBoxed(op, keyset, stack);
    else
      call_later_kernel(op, keyset, stack);
  }

 private:
  // There was no kernel. Runs one for all backends that was registered since.
  C10_NOINLINE void call_later_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                                      torch::jit::Stack* stack) const;

  c10::KernelFunction kernel_;
  std::string origin_;
  c10::DispatchKey key_;
};

// A call for which running the native kernel is not enough: what to do with it.
struct PendingCall {
  enum class Action : uint8_t {
    TryOverrides,           // an override may take it; if that declines, try the ones after it
    ReturnResults,          // a launch plan was replayed
    Withdraw,               // the op is another one by now: deregister, and dispatch again
    RunNative,              // this thread bypasses the router, and notes what native returns
    Observe,                // tell the observer, then route the call
    ObserveComposite,       // tell the observer, then run the composite whatever conditions say
    ObserveKeptDerivative,  // the same, because autograd differentiates the call
    ObserveDifferentiated,  // tell the observer, then try overrides that autograd differentiates
    PassToTracer,           // redispatch below autograd, so that a tracer sees the op whole
    RegisterDeferred,       // deferred overrides may have a derivative: register, and route again
    Differentiate,          // an override's custom derivative may apply; if not, the composite runs
  };
  Action action = Action::TryOverrides;
  torch::jit::Stack results;     // of the replayed plan, for ReturnResults
  bool condition_holds = false;  // the condition of the first of `rest` holds
  // Autograd differentiates the call, so only overrides take it whose impls it differentiates.
  bool is_differentiated = false;
  // Those with two functions decline it, and their misses are still to be counted.
  bool counts_functions = false;
  c10::Device device{c10::DeviceType::CPU};
  Overrides rest;  // the first override that may take the call, and those after it

  ~PendingCall();
};

class alignas(64) Router {
 public:
  // Registers a router at the dispatcher, for a composite op also at the autograd key.
  static std::shared_ptr<Router> install(const std::string& name, const std::string& overload,
                                         const std::string& dispatch_key,
                                         std::unique_ptr<Observer> observer);

  // Without effect once the op was destroyed.
  void publish(Overrides overrides);

  // Registers another kernel for what the router does, such as one for custom derivatives.
  void register_kernel(c10::DispatchKey key, c10::KernelFunction kernel,
                       std::optional<c10::impl::CppSignature> signature = std::nullopt);
  // Takes all that was registered off the dispatcher. Calls that are in it go on.
  void deregister();
  static void deregister_outdated();
  // Whether the op was destroyed since, so that neither the overrides nor the native kernel are
  // those of an op that a call may mean. Note [Ops that are destroyed]
  bool is_outdated() const noexcept { return is_outdated_.load(std::memory_order_relaxed); }
  // Takes an outdated router off the dispatcher, with its overrides, and dispatches a call again.
  void withdraw(Call& call);
  // Throws if the op was destroyed, and its handle with it.
  void check_op_exists() const;

  // Sets the custom derivatives of the overrides of a composite op, for good.
  void set_derivative(std::shared_ptr<Derivative> derivative);

  // A boxed call. `at_autograd`: the call of a composite op, at the autograd key.
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack, bool at_autograd);

  // Whether there is nothing to route, so that arguments need not be looked at.
  bool is_idle() const noexcept {
    return chain_.load(std::memory_order_relaxed) == nullptr && !Frame::any() && !is_outdated();
  }

  // The argument, by its position, that `misses_at_once` asks for; `kAsksNone` if it asks for none.
  int16_t asked_argument() const noexcept {
    return asked_argument_.load(std::memory_order_relaxed);
  }
  // Whether every override declines a call, as far as the test that they have in common says so.
  // Then the miss is counted, and the native kernel must run. Nearly every call ends here. False if
  // that is not known. `asked`: the tensor at the position `asked_argument`; null if it is none.
  [[gnu::hot]] bool misses_at_once(int16_t asked_argument, const c10::TensorImpl* asked) const;

  // Routes a call. Null if every override declines: then the misses are counted, and the native
  // kernel must run. `observed`: the observer has been told of the call.
  [[gnu::hot]] std::unique_ptr<PendingCall> pending_call(const Argument* arguments,
                                                         bool observed = false) const;

  // Routes the call of a composite op at the autograd key.
  [[gnu::hot]] std::unique_ptr<PendingCall> pending_call_at_autograd(
      const Argument* arguments, c10::DispatchKeySet keyset) const;

  // Runs the override that takes the call, or the native kernel. Results replace the arguments on
  // the stack. `observed`: the observer has been told of the call.
  void run_pending(PendingCall& pending, Call& call, bool observed = false);

  const NativeKernel& native() const noexcept { return native_; }
  // What a call with these keys runs without opgraft: at the autograd key the composite.
  const NativeKernel& native(c10::DispatchKeySet keyset) const noexcept {
    return composite_kernel_ && keyset.has_any(c10::autograd_dispatch_keyset) ? *composite_kernel_
                                                                              : native_;
  }
  // The keys to exclude while an impl runs, so that it runs as a kernel at the router's key does.
  c10::DispatchKeySet excluded() const noexcept { return excluded_; }
  // Whether the op had a kernel of its own at the router's key, not only one for all backends.
  bool has_own_kernel() const noexcept { return has_own_kernel_; }
  // Have impls see their callers' autocast, as a native kernel does that calls other ops. Not while
  // there are overrides.
  void let_autocast_through() noexcept { excluded_ = excluded_ - c10::autocast_dispatch_keyset; }
  bool is_composite() const noexcept { return composite_kernel_.has_value(); }
  const NativeKernel& composite_kernel() const { return composite_kernel_.value(); }
  const c10::OperatorHandle& op() const noexcept { return op_; }
  c10::DispatchKey key() const noexcept { return key_; }
  size_t argument_count() const noexcept { return argument_count_; }
  size_t output_count() const noexcept { return output_count_; }
  // Whether calls arrive as C++ arguments, and are boxed only if an override may take them.
  bool is_typed() const noexcept { return is_typed_; }

  // Makes every call a miss from now on. The interpreter is exiting, and would end a thread that
  // requests the GIL in the middle of C++. Waits up to two seconds for threads that are in Python.
  static void shut_down() noexcept;

  // Called in the child of a fork, where no other thread is in Python.
  static void forget_other_threads() noexcept;

  // Held by a thread that enters Python for a call. `allowed()` is false once the interpreter is
  // exiting.
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
  class InCall;
  bool register_at(c10::DispatchKey key, bool at_autograd);
  C10_NOINLINE static std::unique_ptr<PendingCall> with_action(PendingCall::Action action);
  C10_NOINLINE static std::unique_ptr<PendingCall> with_overrides(const Chain& chain, size_t first,
                                                                  bool condition_holds,
                                                                  c10::Device device);
  // What to do with a call of a composite op that autograd must differentiate. Null: the composite
  // runs.
  C10_NOINLINE std::unique_ptr<PendingCall> pending_derivative(const Argument* arguments,
                                                               c10::DispatchKeySet keyset) const;
  // The same, for overrides whose impls autograd differentiates. `counts_functions`: those with two
  // functions decline the call, which is still to be counted of those that come first.
  C10_NOINLINE std::unique_ptr<PendingCall> pending_differentiated(const Argument* arguments,
                                                                   bool counts_functions,
                                                                   bool observed) const;
  C10_NOINLINE static void count_misses(const Chain& chain);
  C10_NOINLINE void count_misses() const;
  // Null if the override declines.
  C10_NOINLINE std::unique_ptr<PendingCall> pending_unboxed(const Chain& chain, size_t index,
                                                            const Argument* arguments,
                                                            bool condition_holds,
                                                            c10::Device device) const;
  C10_NOINLINE c10::Device device_without_tensors(const Argument* arguments) const;
  bool replay_unboxed(const Override& override, const PlanEntry& entry, const Argument* arguments,
                      torch::jit::Stack& results) const;
  // Runs what a call runs without opgraft.
  void run_native(Call& call) const;
  void route(Call& call, bool observed);
  bool try_overrides(const PendingCall& pending, Call& call, bool observed);
  bool takes(const Override& override, Call& call);
  bool run(const Override& override, Call& call, c10::Device device, bool is_differentiated);
  void run_differentiated(Call& call, bool counts_functions, bool observed);
  // Runs the composite, which autograd differentiates.
  void run_keeping_derivative(Call& call, bool observed);
  // None if autograd's keys have seen the call already.
  std::optional<AutogradBookkeeping> make_bookkeeping(c10::ArrayRef<Argument> arguments) const;

  // The position of no argument, nor of a test that does not exist.
  static constexpr int16_t kAsksNone = -2;

  // The members that a miss reads come first, in one cache line.
  std::atomic<const Chain*> chain_{nullptr};  // null: empty
  std::atomic<bool> is_outdated_{false};
  std::atomic<int16_t> asked_argument_{kAsksNone};  // of the chain's common test
  size_t argument_count_;
  NativeKernel native_;
  c10::OperatorHandle op_;
  size_t output_count_;
  bool has_own_kernel_;
  std::string name_;
  c10::DispatchKey key_;
  c10::DeviceType device_type_;
  std::optional<NativeKernel> composite_kernel_;  // what a composite op runs at the autograd key
  bool writes_or_aliases_ = false;
  c10::DispatchKeySet excluded_;
  std::unique_ptr<Observer> observer_;
  std::atomic<const Derivative*> derivative_{nullptr};  // never destroyed
  bool is_typed_ = false;
  // Calls that are in the boxed kernel, of an op that may be destroyed.
  std::atomic<int64_t> calls_{0};
  bool may_be_destroyed_;
  std::mutex registering_;
  std::vector<Registration> registrations_;
};

// A router as the dispatcher's kernel, at its own key or, for a composite op, at the autograd key.
struct RouterKernel final : c10::OperatorKernel {
  RouterKernel(Router& router, bool at_autograd)
      : router(router),
        native(at_autograd ? router.composite_kernel() : router.native()),
        at_autograd(at_autograd) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    router(op, keyset, stack, at_autograd);
  }
  std::unique_ptr<PendingCall> pending_call(const Argument* arguments,
                                            c10::DispatchKeySet keyset) const {
    return at_autograd ? router.pending_call_at_autograd(arguments, keyset)
                       : router.pending_call(arguments);
  }
  Router& router;
  const NativeKernel& native;
  bool at_autograd;
};

}  // namespace opgraft
