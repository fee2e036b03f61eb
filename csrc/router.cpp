#include "router.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <thread>
#include <utility>

#include "derivative.h"
#include "epochs.h"
#include "outdated.h"
#include "tensors.h"
#include "torch_private.h"
#include "typed.h"

namespace opgraft {

namespace {

std::atomic<bool> shutting_down{false};
std::atomic<int> in_python{0};
thread_local int here_in_python = 0;

// Routers that are to be taken off the dispatcher.
auto& outdated = *new std::vector<Router*>();
std::mutex outdated_mutex;

// --------------------------------------------------------------------------- registration

// A router's kernel, and its signature if calls arrive as C++ arguments.
std::pair<c10::KernelFunction, std::optional<c10::impl::CppSignature>> kernel_of(Router& router,
                                                                                 bool at_autograd) {
  const auto& native = at_autograd ? router.composite_kernel() : router.native();
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
      std::make_unique<RouterKernel>(router, at_autograd));
  std::optional<c10::impl::CppSignature> signature;
  if (const auto made = typed_function(router.op(), native)) {
    set_unboxed(kernel, made->function, made->takes_symbolic_sizes);
    signature = made->signature;
  }
  return {std::move(kernel), std::move(signature)};
}

// --------------------------------------------------------------------------- the call's tensors

// With these keys a tensor's memory does not hold its values, or it has none.
constexpr c10::DispatchKeySet kLazy{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                    c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
                                    c10::DispatchKey::Functionalize};

// Whether it holds its values in memory, and has sizes that are not symbolic.
bool is_plain(const c10::TensorImpl& tensor) {
  return !tensor.key_set().has_any(kLazy) && !tensor.has_symbolic_sizes_strides();
}

// Whether an impl may run for the call: its tensors are plain and on one device (0-dim CPU tensors
// aside). Sets the device, if there is a tensor.
bool is_plain(c10::ArrayRef<Argument> arguments, c10::Device& device, bool& found) {
  return all_tensors(arguments, [&](const c10::TensorImpl& tensor) {
    if (!is_plain(tensor)) return false;
    const c10::Device here = tensor.device();
    if (here.is_cpu() && tensor.dim() == 0) return true;
    if (found) return here == device;
    found = true;
    device = here;
    return true;
  });
}

// The tracer of torch.jit.trace records most ops, and is off while they run. Of a few it records
// what they call instead: a kernel that writes memory by itself would leave an empty tensor in the
// trace.
bool is_recorded_by_torchscript() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return local.included_.has(c10::DispatchKey::Tracer) &&
         !local.excluded_.has(c10::DispatchKey::Tracer);
}

}  // namespace

// --------------------------------------------------------------------------- NativeKernel

NativeKernel::NativeKernel(const c10::OperatorHandle& op, c10::DispatchKey key) : key_(key) {
  if (!op.hasComputedKernelForDispatchKey(key)) return;
  const auto safe = op.getComputedKernelForDispatchKey(key);
  kernel_ = kernel_of(safe);
  origin_ = safe.debug();
}

void NativeKernel::call_later_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                                     torch::jit::Stack* stack) const {
  // At the router's key the dispatcher has the router, at this one it has nothing else.
  if (const NativeKernel later(op, c10::DispatchKey::Undefined); later.kernel_.isValid()) {
    later.kernel_.callBoxed(op, keyset, stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(), " has no native kernel at ", c10::toString(key_),
      ", and no override took the call; opgraft.explain('", op.operator_name(), "', ...) says why");
}

bool BoxedImpl::run(const Override& override, Call& call, c10::Device) {
  override.hits->add();
  const ExcludeKeys exclude(call.excluded);
  function_(call.op, call.impl_keyset(), &call.stack);
  return true;
}

// --------------------------------------------------------------------------- Chain

Chain::Chain(Overrides overrides) : overrides_(std::move(overrides)) {
  misses_place_ = misses_->place();
  for (size_t index = 0; index < size(); ++index) {
    const TensorTest& test = overrides_[index]->condition.tensor_test();
    tensor_tests_.push_back(test);
    if (index == 0) {
      common_test_ = test;
    } else {
      common_test_.widen(test);
    }
    overrides_[index]->misses->include(misses_);
    any_derivative_ =
        any_derivative_ || overrides_[index]->is_differentiated || overrides_[index]->has_functions;
  }
}

// Runs when no call reads the chain any more.
Chain::~Chain() {
  for (const auto& override : overrides_) override->misses->absorb(*misses_);
}

// --------------------------------------------------------------------------- Router

Router::Router(c10::OperatorHandle op, c10::DispatchKey key, std::unique_ptr<Observer> observer)
    : argument_count_(op.schema().arguments().size()),
      native_(op, key),
      op_(std::move(op)),
      output_count_(op_.schema().returns().size()),
      has_own_kernel_(op_.hasKernelForDispatchKey(key)),
      name_(c10::toString(op_.operator_name())),
      key_(key),
      device_type_(c10::dispatchKeyToDeviceType(key)),
      observer_(std::move(observer)),
      may_be_destroyed_(name_.rfind("aten::", 0) != 0) {
  // A kernel for all backends calls other ops, which go through autocast. So do its overrides'
  // impls.
  if (has_own_kernel_) excluded_ = c10::autocast_dispatch_keyset;
  if (!has_own_kernel_ &&
      op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    composite_kernel_.emplace(op_, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)));
    writes_or_aliases_ = writes_or_aliases(op_.schema());
    excluded_ = excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  }
}

std::shared_ptr<Router> Router::install(const std::string& name, const std::string& overload,
                                        const std::string& dispatch_key,
                                        std::unique_ptr<Observer> observer) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto key = c10::parseDispatchKey(dispatch_key);
  // Never destroyed, like its registration.
  auto& router = *new std::shared_ptr<Router>(
      std::make_shared<Router>(std::move(op), key, std::move(observer)));
  when_destroyed(router->op_.operator_name(), [self = router.get()] {
    self->is_outdated_.store(true, std::memory_order_seq_cst);
    self->publish({});  // so that each call looks
    {
      const std::lock_guard<std::mutex> lock(outdated_mutex);
      outdated.push_back(self);
    }
    schedule_withdrawal();
  });
  // The autograd key first, because the backend's kernel hides the composite.
  if (router->composite_kernel_) {
    router->register_at(c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)),
                        /*at_autograd=*/true);
  }
  router->is_typed_ = router->register_at(key, /*at_autograd=*/false);
  return router;
}

// Returns whether calls arrive as C++ arguments.
bool Router::register_at(c10::DispatchKey key, bool at_autograd) {
  auto [kernel, signature] = kernel_of(*this, at_autograd);
  const bool typed = signature.has_value();
  register_kernel(key, std::move(kernel), std::move(signature));
  return typed;
}

void Router::register_kernel(c10::DispatchKey key, c10::KernelFunction kernel,
                             std::optional<c10::impl::CppSignature> signature) {
  const std::lock_guard<std::mutex> lock(registering_);
  registrations_.emplace_back(op_, key, std::move(kernel), std::move(signature));
}

void Router::check_op_exists() const {
  TORCH_CHECK(!is_outdated(), name_, " was destroyed while a call of it ran");
}

void Router::deregister() {
  publish({});
  const std::lock_guard<std::mutex> lock(registering_);
  for (auto& each : registrations_) each.remove();
  // Native kernels hold what the op's author gave them: a notebook's models. A typed kernel, which
  // counts no calls, is C++'s, and holds next to nothing.
  if (is_outdated() && may_be_destroyed_ && !is_typed_ &&
      calls_.load(std::memory_order_seq_cst) == 0) {
    native_.drop();
    if (composite_kernel_) composite_kernel_->drop();
  }
}

void Router::deregister_outdated() {
  std::vector<Router*> taken;
  {
    const std::lock_guard<std::mutex> lock(outdated_mutex);
    taken.swap(outdated);
  }
  for (auto* router : taken) router->deregister();
}

void Router::withdraw(Call& call) {
  deregister();
  withdraw_overrides();
  call.op.redispatchBoxed(call.keyset, &call.stack);
}

void Router::publish(Overrides overrides) {
  if (is_outdated_.load(std::memory_order_seq_cst)) overrides.clear();
  const auto* fresh = overrides.empty() ? nullptr : new Chain(std::move(overrides));
  const bool asks = fresh != nullptr && fresh->common_test().exists();
  asked_argument_.store(asks ? fresh->common_test().argument : kAsksNone,
                        std::memory_order_relaxed);
  const auto* old = chain_.exchange(fresh, std::memory_order_seq_cst);
  if (old != nullptr) Epochs::instance().retire([old] { delete old; });
}

void Router::set_derivative(std::shared_ptr<Derivative> derivative) {
  const auto* kept = new std::shared_ptr<Derivative>(std::move(derivative));
  derivative_.store(kept->get(), std::memory_order_release);
}

void Router::shut_down() noexcept {
  shutting_down.store(true, std::memory_order_seq_cst);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (in_python.load(std::memory_order_seq_cst) > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// This counts before it reads the flag, and `shut_down` sets the flag before it reads the count. So
// every thread that is allowed is waited for.
Router::InPython::InPython() noexcept {
  ++here_in_python;
  in_python.fetch_add(1, std::memory_order_seq_cst);
  allowed_ = !shutting_down.load(std::memory_order_seq_cst);
}

Router::InPython::~InPython() {
  in_python.fetch_sub(1, std::memory_order_seq_cst);
  --here_in_python;
}

void Router::forget_other_threads() noexcept {
  in_python.store(here_in_python, std::memory_order_relaxed);
}

// Counts a call while it is in the kernel. It reads whether the router is outdated later, and
// `deregister` reads the count after the router is.
class Router::InCall {
 public:
  explicit InCall(Router& router) : router_(router.may_be_destroyed_ ? &router : nullptr) {
    if (C10_UNLIKELY(router_ != nullptr)) router_->calls_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~InCall() {
    if (C10_UNLIKELY(router_ != nullptr)) router_->calls_.fetch_sub(1, std::memory_order_seq_cst);
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Router* router_;
};

void Router::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                        torch::jit::Stack* stack, bool at_autograd) {
  const InCall in_call(*this);
  Call call{op, keyset, *stack, argument_count_};
  std::unique_ptr<PendingCall> found;
  // Another library's op can be redefined with other arguments. Then the router must not touch the
  // call.
  if (C10_UNLIKELY(is_outdated())) {
    found = with_action(PendingCall::Action::Withdraw);
  } else if (!is_idle() && C10_LIKELY(op.schema().arguments().size() == argument_count_)) {
    const auto arguments = call.view();
    found = at_autograd ? pending_call_at_autograd(arguments.data(), keyset)
                        : pending_call(arguments.data());
  }
  if (found) {
    run_pending(*found, call);
  } else if (C10_UNLIKELY(keyset.has(c10::DispatchKey::PythonDispatcher))) {
    run_native(call);
  } else {
    (at_autograd ? *composite_kernel_ : native_).call(op, keyset, stack);
  }
}

// For traces torch has decompositions in Python of some composite ops. Its Python dispatcher runs
// them for ops that have no kernel at the backend key or its autograd key. Our kernels are there,
// so the router runs them.
void Router::run_native(Call& call) const {
  check_op_exists();
  const bool traced = composite_kernel_ && call.keyset.has(c10::DispatchKey::PythonDispatcher) &&
                      call.keyset.has_any(c10::autograd_dispatch_keyset);
  if (C10_UNLIKELY(traced) && call.op.schema().arguments().size() == argument_count_ &&
      observer_->decompose(call)) {
    return;
  }
  native(call.keyset).call(call.op, call.keyset, &call.stack);
}

void Router::route(Call& call, bool observed) {
  if (const auto found = pending_call(call.view().data(), observed)) {
    run_pending(*found, call, observed);
  } else {
    run_native(call);
  }
}

// The composite runs, whatever the conditions say, if autograd must differentiate the call, or if
// something between autograd and the backend must see the decomposition.
std::unique_ptr<PendingCall> Router::pending_call_at_autograd(const Argument* arguments,
                                                              c10::DispatchKeySet keyset) const {
  if (C10_UNLIKELY(is_outdated())) return with_action(PendingCall::Action::Withdraw);
  if (Frame::bypasses(this, name_)) return with_action(PendingCall::Action::RunNative);
  if (chain_.load(std::memory_order_relaxed) == nullptr) return nullptr;
  const bool keeps_derivative = must_differentiate({arguments, argument_count_});
  const Interceptor found = keeps_derivative ? Interceptor::Other : interceptor_of(keyset, key_);
  if (C10_LIKELY(!keeps_derivative && found == Interceptor::None)) return pending_call(arguments);
  if (!keeps_derivative && found == Interceptor::Tracer && !writes_or_aliases_)
    return with_action(PendingCall::Action::PassToTracer);
  if (keeps_derivative) {
    if (auto pending = pending_derivative(arguments, keyset)) return pending;
  }
  if (C10_UNLIKELY(Scope::any()) && Scope::is_observed()) {
    return with_action(keeps_derivative ? PendingCall::Action::ObserveKeptDerivative
                                        : PendingCall::Action::ObserveComposite);
  }
  if (!keeps_derivative) count_misses();
  return nullptr;
}

// What sees a composite op's pieces (a dispatch mode, a subclass, functorch) sees them in training,
// too.
std::unique_ptr<PendingCall> Router::pending_derivative(const Argument* arguments,
                                                        c10::DispatchKeySet keyset) const {
  const Interceptor found = interceptor_of(keyset, key_);
  if (found == Interceptor::Other) return nullptr;
  {
    const Epochs::Reader reader;
    const Chain* chain = chain_.load(std::memory_order_seq_cst);
    if (chain != nullptr && chain->overrides().front()->is_placeholder &&
        !(Scope::any() && Scope::is_off(chain->overrides().front()->identity))) {
      auto pending = with_action(PendingCall::Action::RegisterDeferred);
      pending->rest.push_back(chain->overrides().front());
      return pending;
    }
  }
  const Derivative* derivative = derivative_.load(std::memory_order_acquire);
  // A tracer's tensors may have symbolic sizes, of which Python decides.
  if (derivative != nullptr &&
      (found == Interceptor::Tracer || derivative->may_differentiate(arguments))) {
    return with_action(PendingCall::Action::Differentiate);
  }
  // A tracer would see what an impl calls, and the graph would be without the override's condition.
  if (found != Interceptor::None) return nullptr;
  return pending_differentiated(arguments, /*counts_functions=*/true, /*observed=*/false);
}

// Their impls run at the autograd key. What they call may have no forward-mode derivative: the
// composite has.
std::unique_ptr<PendingCall> Router::pending_differentiated(const Argument* arguments,
                                                            bool counts_functions,
                                                            bool observed) const {
  const Epochs::Reader reader;
  const Chain* chain = chain_.load(std::memory_order_seq_cst);
  if (chain == nullptr || !chain->any_derivative() ||
      shutting_down.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const bool is_scoped = Scope::any();
  if (C10_UNLIKELY(is_scoped) && !observed && Scope::is_observed()) {
    auto found = with_action(PendingCall::Action::ObserveDifferentiated);
    found->counts_functions = counts_functions;
    return found;
  }
  const c10::ArrayRef<Argument> all(arguments, argument_count_);
  if (has_tangents(all)) return nullptr;  // nobody is asked, so nobody misses
  Counter::Shard& shard = Counter::shard();
  c10::Device device(c10::DeviceType::CPU);
  std::optional<bool> may_run;  // not known until one whose impl is differentiated is asked
  for (size_t index = 0; index < chain->size(); ++index) {
    const Override& override = (*chain)[index];
    if (C10_UNLIKELY(is_scoped) && Scope::is_off(override.identity)) continue;
    if (!override.is_differentiated) {
      if (counts_functions && override.has_functions) override.misses->add(shard);
      continue;
    }
    if (!may_run) {
      bool device_found = false;
      may_run = is_plain(all, device, device_found) && !is_recorded_by_torchscript();
    }
    const bool decided_in_python = override.decides_in_python.load(std::memory_order_relaxed);
    if (!*may_run || !chain->tensor_test(index).passes(arguments) ||
        (!decided_in_python && !override.condition.holds(arguments))) {
      override.misses->add(shard);
      continue;
    }
    auto found = with_overrides(*chain, index, /*condition_holds=*/!decided_in_python, device);
    found->is_differentiated = true;
    found->counts_functions = counts_functions;
    return found;
  }
  return nullptr;
}

// Every call runs this, after the op itself has filled the caches. So it is one small function that
// calls nothing, and what is rare is elsewhere: whatever needs another function is not known here.
bool Router::misses_at_once(int16_t asked_argument, const c10::TensorImpl* asked) const {
  if (C10_UNLIKELY(Frame::any() || Scope::any_anywhere() || !Epochs::QuickReader::is_possible()))
    return false;
  const Epochs::QuickReader reader;
  const Chain* chain = chain_.load(std::memory_order_seq_cst);
  if (C10_UNLIKELY(chain == nullptr)) return !is_outdated();
  const TensorTest& test = chain->common_test();
  // There is no test, or the chain is newer than the position.
  if (C10_UNLIKELY(test.argument != asked_argument)) return false;
  // If there is no tensor, or it is not plain, every override declines too.
  if (C10_LIKELY(asked != nullptr && is_plain(*asked))) {
    if (C10_UNLIKELY(has_custom_sizes(*asked))) return false;
    if (test.passes_but_for_strides(*asked)) return false;
  }
  return chain->count_miss_quickly();
}

std::unique_ptr<PendingCall> Router::pending_call(const Argument* arguments, bool observed) const {
  if (C10_UNLIKELY(is_outdated())) return with_action(PendingCall::Action::Withdraw);
  if (Frame::bypasses(this, name_)) return with_action(PendingCall::Action::RunNative);
  if (chain_.load(std::memory_order_relaxed) == nullptr) return nullptr;
  const Epochs::Reader reader;
  const Chain* found_chain = chain_.load(std::memory_order_seq_cst);
  if (C10_UNLIKELY(found_chain == nullptr || shutting_down.load(std::memory_order_relaxed)))
    return nullptr;
  const Chain& chain = *found_chain;
  const bool is_scoped = Scope::any();
  if (C10_UNLIKELY(is_scoped) && !observed && Scope::is_observed())
    return with_action(PendingCall::Action::Observe);
  Counter::Shard& shard = Counter::shard();
  c10::Device device(c10::DeviceType::CPU);
  bool device_found = false;
  if (C10_UNLIKELY(
          !is_plain(c10::ArrayRef<Argument>(arguments, argument_count_), device, device_found) ||
          is_recorded_by_torchscript())) {
    count_misses(chain);
    return nullptr;
  }
  // Note [Misses]
  bool counts_each = is_scoped;
  const auto count_miss = [&](size_t index) {
    if (counts_each) chain[index].misses->add(shard);
  };
  const auto count_each_from_here = [&](size_t index) {
    if (std::exchange(counts_each, true)) return;
    for (size_t before = 0; before < index; ++before) chain[before].misses->add(shard);
  };
  for (size_t index = 0; index < chain.size(); ++index) {
    if (C10_UNLIKELY(is_scoped) && Scope::is_off(chain[index].identity)) continue;
    if (!chain.tensor_test(index).passes(arguments)) {
      count_miss(index);
      continue;
    }
    const Override& override = chain[index];
    const bool decided_in_python = override.decides_in_python.load(std::memory_order_relaxed);
    if (C10_LIKELY(!decided_in_python && !override.condition.passes_more_quick_tests(arguments))) {
      count_miss(index);
      continue;
    }
    // Observers and profilers are told which override ran only on the boxed path.
    const bool may_decide_unboxed =
        !decided_in_python && !observed && override.has_plans != nullptr && !at::hasCallbacks();
    // If there is a plan, the condition's other tests pass. A lookup takes longer than most
    // conditions.
    const bool may_replay =
        may_decide_unboxed && override.has_plans->load(std::memory_order_relaxed);
    const bool condition_holds =
        !decided_in_python && !may_replay && override.condition.passes_other_tests(arguments);
    if (!decided_in_python && !may_replay && !condition_holds) {
      count_miss(index);
      continue;
    }
    count_each_from_here(index);
    if (C10_UNLIKELY(!device_found)) device = device_without_tensors(arguments);
    if (!may_decide_unboxed) return with_overrides(chain, index, condition_holds, device);
    if (auto found = pending_unboxed(chain, index, arguments, condition_holds, device))
      return found;
  }
  if (!counts_each) chain.count_miss();
  return nullptr;
}

PendingCall::~PendingCall() = default;  // out of line, to keep its users small

// The device of a call without tensors, or with only 0-dim CPU tensors. A factory function names it
// by an argument, or means the current device of the router's key.
c10::Device Router::device_without_tensors(const Argument* arguments) const {
  if (!c10::impl::hasDeviceGuardImpl(device_type_)) return c10::Device(c10::DeviceType::CPU);
  for (size_t index = 0; index < argument_count_; ++index) {
    if (arguments[index].kind() != Argument::Kind::Device) continue;
    if (const auto given = arguments[index].device(); given.type() == device_type_) return given;
  }
  return c10::Device(device_type_);
}

std::unique_ptr<PendingCall> Router::with_action(PendingCall::Action action) {
  auto found = std::make_unique<PendingCall>();
  found->action = action;
  return found;
}

// An impl runs outside the epoch (Note [Epochs]). It may take long, and removing its override must
// not wait for it.
std::unique_ptr<PendingCall> Router::with_overrides(const Chain& chain, size_t first,
                                                    bool condition_holds, c10::Device device) {
  auto found = std::make_unique<PendingCall>();
  found->condition_holds = condition_holds;
  found->device = device;
  const auto begin = chain.overrides().begin();
  found->rest.assign(begin + static_cast<std::ptrdiff_t>(first), chain.overrides().end());
  return found;
}

std::unique_ptr<PendingCall> Router::pending_unboxed(const Chain& chain, size_t index,
                                                     const Argument* arguments,
                                                     bool condition_holds,
                                                     c10::Device device) const {
  const Override& override = chain[index];
  using Kind = Impl::UnboxedDecision::Kind;
  const auto decision =
      override.impl->decide_unboxed(override, {arguments, argument_count_}, condition_holds);
  if (decision.kind == Kind::Declines) return nullptr;
  if (decision.kind == Kind::Replays) {
    const Frame frame(this);
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::optional<c10::Device>()
                                                         : std::optional<c10::Device>(device));
    auto found = std::make_unique<PendingCall>();
    std::optional<AutogradBookkeeping> bookkeeping;
    if (C10_UNLIKELY(composite_kernel_.has_value()))
      bookkeeping = make_bookkeeping({arguments, argument_count_});
    if (replay_unboxed(override, *decision.entry, arguments, found->results)) {
      found->action = PendingCall::Action::ReturnResults;
      if (C10_UNLIKELY(frame.ended_in_native(found->results, output_count_)))
        override.fallbacks->add();
      if (C10_UNLIKELY(bookkeeping.has_value()))
        bookkeeping->finish(found->results, output_count_, name_);
      return found;
    }
  }
  return with_overrides(chain, index, /*condition_holds=*/true, device);
}

bool Router::replay_unboxed(const Override& override, const PlanEntry& entry,
                            const Argument* arguments, torch::jit::Stack& results) const {
  const ExcludeKeys exclude(excluded_);
  return override.impl->replay_unboxed(override, entry, arguments, results);
}

void Router::count_misses() const {
  const Epochs::Reader reader;
  if (const Chain* chain = chain_.load(std::memory_order_seq_cst)) count_misses(*chain);
}

void Router::count_misses(const Chain& chain) {
  for (const auto& override : chain.overrides()) {
    if (!Scope::is_off(override->identity)) override->misses->add();
  }
}

void Router::run_pending(PendingCall& pending, Call& call, bool observed) {
  using Action = PendingCall::Action;
  const auto run_native = [&] {
    this->run_native(call);
  };
  switch (pending.action) {
    case Action::ReturnResults:
      call.set_results(pending.results);
      return;
    case Action::TryOverrides:
      if (!try_overrides(pending, call, observed)) run_native();
      return;
    case Action::Withdraw:
      withdraw(call);
      return;
    case Action::RunNative:
      run_native();
      Frame::note_native(this, call.stack, output_count_);
      return;
    case Action::Observe:
      observer_->observe(call, /*keeps_derivative=*/false, [&] { route(call, /*observed=*/true); });
      return;
    case Action::ObserveComposite:
      observer_->observe(call, /*keeps_derivative=*/false, [&] {
        count_misses();
        run_native();
      });
      return;
    case Action::ObserveKeptDerivative:
      observer_->observe(call, /*keeps_derivative=*/true, run_native);
      return;
    case Action::RegisterDeferred: {
      const Override& placeholder = *pending.rest.front();
      if (placeholder.impl->takes(placeholder, call))
        (*this)(call.op, call.keyset, &call.stack, /*at_autograd=*/true);
      else
        run_native();
      return;
    }
    case Action::ObserveDifferentiated:
      observer_->observe(call, /*keeps_derivative=*/true,
                         [&] { run_differentiated(call, pending.counts_functions, true); });
      return;
    case Action::Differentiate: {
      const auto by =
          derivative_.load(std::memory_order_acquire)->differentiate(call.keyset, call.stack);
      if (by == Derivative::By::Override) return;
      if (by == Derivative::By::OwnDerivative &&
          interceptor_of(call.keyset, key_) == Interceptor::None) {
        run_differentiated(call, /*counts_functions=*/false, /*observed=*/false);  // Python has
        return;
      }
      run_keeping_derivative(call, /*observed=*/false);
      return;
    }
    case Action::PassToTracer:
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(call.keyset & c10::after_ADInplaceOrView_keyset, &call.stack);
      return;
  }
}

void Router::run_differentiated(Call& call, bool counts_functions, bool observed) {
  const auto arguments = call.view();
  if (const auto pending = pending_differentiated(arguments.data(), counts_functions, observed))
    run_pending(*pending, call, observed);
  else
    run_keeping_derivative(call, observed);
}

void Router::run_keeping_derivative(Call& call, bool observed) {
  if (C10_UNLIKELY(Scope::any()) && !observed && Scope::is_observed())
    observer_->observe(call, /*keeps_derivative=*/true, [&] { run_native(call); });
  else
    run_native(call);
}

// If an impl declines after all, the overrides after it are tried.
bool Router::try_overrides(const PendingCall& pending, Call& call, bool observed) {
  bool condition_holds = pending.condition_holds;
  for (const auto& override : pending.rest) {
    const bool is_known = std::exchange(condition_holds, false);
    if (pending.is_differentiated && !override->is_differentiated) {
      const bool declines = pending.counts_functions && override->has_functions;
      if (declines && !Scope::is_off(override->identity)) override->misses->add();
      continue;
    }
    if (!is_known && Scope::is_off(override->identity)) continue;
    if (C10_UNLIKELY(override->is_placeholder)) {
      if (!override->impl->takes(*override, call)) continue;
      route(call, observed);  // as a new call, so only the new chain counts it
      return true;
    }
    if ((is_known || takes(*override, call)) &&
        run(*override, call, pending.device, pending.is_differentiated)) {
      return true;
    }
    if (C10_UNLIKELY(call.wants_native)) return false;
  }
  return false;
}

bool Router::takes(const Override& override, Call& call) {
  if (override.decides_in_python.load(std::memory_order_relaxed))
    return override.impl->takes(override, call);
  if (override.condition.holds(call.view().data())) return true;
  override.misses->add();
  return false;
}

bool Router::run(const Override& override, Call& call, c10::Device device, bool is_differentiated) {
  const Frame frame(this);
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::optional<c10::Device>()
                                                       : std::optional<c10::Device>(device));
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (C10_UNLIKELY(record.isActive())) record.before(override.label);
  std::optional<AutogradBookkeeping> bookkeeping;
  if (C10_UNLIKELY(composite_kernel_.has_value()) && !is_differentiated)
    bookkeeping = make_bookkeeping(call.view());
  call.ran = &override;
  call.excluded = is_differentiated ? excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView
                                    : excluded_;
  if (!override.impl->run(override, call, device)) {
    call.ran = nullptr;
    return false;
  }
  if (C10_UNLIKELY(frame.ended_in_native(call.stack, output_count_))) {
    override.fallbacks->add();
    call.fell_back = true;
  }
  if (bookkeeping) bookkeeping->finish(call.stack, output_count_, name_);
  return true;
}

std::optional<AutogradBookkeeping> Router::make_bookkeeping(
    c10::ArrayRef<Argument> arguments) const {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView))
    return std::nullopt;
  return std::make_optional<AutogradBookkeeping>(op_.schema(), arguments);
}

}  // namespace opgraft
