#include "router.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <thread>
#include <utility>

#include "epochs.h"
#include "torch_private.h"
#include "typed.h"

namespace opgraft {

const char* const kOrigin = "opgraft router";

namespace {

std::atomic<bool> shutting_down{false};
std::atomic<int> in_python{0};
thread_local int here_in_python = 0;

// --------------------------------------------------------------------------- registration

// torch warns once per process when a kernel replaces another. `WarnAlways` leaves the once-flag for
// others, and the handler, which is the thread's own, takes our warning out.
class WithoutOurWarning {
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Quiet quiet_;
  c10::WarningUtils::WarningHandlerGuard handler_{&quiet_};
  c10::WarningUtils::WarnAlways always_{true};
};

void put(const c10::OperatorHandle& op, c10::DispatchKey key, c10::KernelFunction kernel,
         std::optional<c10::impl::CppSignature> signature = std::nullopt) {
  const WithoutOurWarning quiet;
  // Never destroyed: the registration stays, and the dispatcher may be gone before our statics.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key, std::move(kernel), std::move(signature),
      /*inferred_function_schema=*/nullptr, kOrigin));
}

struct AutogradKernel final : c10::OperatorKernel {
  explicit AutogradKernel(Router& router) : router(router) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    router.differentiate(keyset, stack);
  }
  Router& router;
};

// --------------------------------------------------------------------------- the call's tensors

// Applies `visit` to each until it returns false.
template <class Visit>
C10_NOINLINE bool all_tensors_of(const Argument& list, Visit& visit) {
  for (size_t index = 0; index < list.size(); ++index) {
    const Argument item = list.item(index);
    if (item.is_none()) continue;
    const auto* tensor = item.tensor();
    if (tensor == nullptr) break;  // a list of something else
    if (!visit(*tensor)) return false;
  }
  return true;
}

template <class Visit>
bool all_tensors(c10::ArrayRef<Argument> arguments, Visit&& visit) {
  for (const Argument& argument : arguments) {
    if (const auto* tensor = argument.tensor()) {
      if (!visit(*tensor)) return false;
    } else if (C10_UNLIKELY(argument.may_hold_tensors())) {
      if (!all_tensors_of(argument, visit)) return false;
    }
  }
  return true;
}

// Keys under which a tensor's memory does not hold its values, or it has none to speak of.
const c10::DispatchKeySet kLazy{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
                                c10::DispatchKey::Functionalize};

// Whether an impl may see the call: its tensors live on one device (0-dim CPU tensors aside), hold
// their values in memory and have sizes that are numbers. Tells the device.
bool is_plain(c10::ArrayRef<Argument> arguments, c10::Device& device) {
  bool found = false;
  return all_tensors(arguments, [&](const c10::TensorImpl& tensor) {
    if (tensor.key_set().has_any(kLazy) || tensor.has_symbolic_sizes_strides()) return false;
    const c10::Device here = tensor.device();
    if (here.is_cpu() && tensor.dim() == 0) return true;
    if (found) return here == device;
    found = true;
    device = here;
    return true;
  });
}

bool has_tangent(const c10::TensorImpl& tensor) {
  const at::Tensor self(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      const_cast<c10::TensorImpl*>(&tensor)));
  return self._fw_grad(/*level=*/0).defined();
}

}  // namespace

// --------------------------------------------------------------------------- NativeKernel

NativeKernel::NativeKernel(const c10::OperatorHandle& op, c10::DispatchKey key) : key_(key) {
  if (!op.hasComputedKernelForDispatchKey(key)) return;
  const auto safe = op.getComputedKernelForDispatchKey(key);
  kernel_ = kernel_of(safe);
  origin_ = safe.debug();
}

void NativeKernel::missing(const c10::OperatorHandle& op) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), " has no native kernel at ",
                              c10::toString(key_), ", and no override took the call; opgraft.explain('",
                              op.operator_name(), "', ...) says why");
}

bool BoxedImpl::run(const Override& override, Call& call, c10::Device) {
  override.hits->add();
  function_(call.op, call.keyset, &call.stack);
  return true;
}

// --------------------------------------------------------------------------- Router

Router::Router(c10::OperatorHandle op, c10::DispatchKey key, std::unique_ptr<Observer> observer)
    : arguments_(op.schema().arguments().size()),
      native_(op, key),
      op_(std::move(op)),
      outputs_(op_.schema().returns().size()),
      name_(c10::toString(op_.operator_name())),
      key_(key),
      observer_(std::move(observer)) {
  const bool composite = !op_.hasKernelForDispatchKey(key) &&
                         op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (composite) {
    composite_.emplace(op_, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)));
  }
}

std::shared_ptr<Router> Router::install(const std::string& name, const std::string& overload,
                                        const std::string& dispatch_key,
                                        std::unique_ptr<Observer> observer) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto key = c10::parseDispatchKey(dispatch_key);
  // Kept for good, as what is put in at the dispatcher is.
  auto& router = *new std::shared_ptr<Router>(
      std::make_shared<Router>(std::move(op), key, std::move(observer)));
  // The companion first: it captured the composite before the backend's kernel hides it.
  if (router->composite_) {
    put(router->op_, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)),
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<AutogradKernel>(*router)));
  }
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<RouterKernel>(*router));
  std::optional<c10::impl::CppSignature> signature;
  if (const auto typed = typed_function(*router)) {
    set_unboxed(kernel, typed->function, typed->takes_symbolic_sizes);
    signature = typed->signature;
    router->typed_ = true;
  }
  put(router->op_, key, std::move(kernel), std::move(signature));
  return router;
}

void Router::publish(Chain chain) {
  const auto* fresh = chain.empty() ? nullptr : new Chain(std::move(chain));
  const auto* old = chain_.exchange(fresh, std::memory_order_seq_cst);
  if (old != nullptr) Epochs::instance().retire([old] { delete old; });
}

void Router::shut_down() noexcept {
  shutting_down.store(true, std::memory_order_seq_cst);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (in_python.load(std::memory_order_seq_cst) > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Counted before the flag is read, and the flag is set before the count is read: whoever is allowed is
// waited for.
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

void Router::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                        torch::jit::Stack* stack) {
  Call call{op, keyset, *stack, arguments_};
  // An op of another library can be defined anew, with other arguments: then we know nothing of it.
  if (C10_LIKELY(op.schema().arguments().size() == arguments_)) {
    route(call, /*observed=*/false);
  } else {
    native_.call(op, keyset, stack);
  }
}

void Router::route(Call& call, bool observed) {
  if (const auto found = pending(call.view().data(), observed)) {
    finish(*found, call, observed);
  } else {
    native_.call(call.op, call.keyset, &call.stack);
  }
}

// Every call runs this, with caches that the op itself has filled: what is rare is out of the way.
std::unique_ptr<Pending> Router::pending(const Argument* arguments, bool observed) const {
  if (Frame::bypasses(this, name_)) return bypassed();
  if (chain_.load(std::memory_order_relaxed) == nullptr) return nullptr;
  const Epochs::Reader reader;
  const Chain* chain = chain_.load(std::memory_order_seq_cst);
  if (C10_UNLIKELY(chain == nullptr || shutting_down.load(std::memory_order_relaxed))) return nullptr;
  const bool scoped = Scope::any();
  if (C10_UNLIKELY(scoped) && !observed && Scope::is_observed()) return to_observe();
  c10::Device device(c10::DeviceType::CPU);
  if (C10_UNLIKELY(!is_plain(c10::ArrayRef<Argument>(arguments, arguments_), device))) {
    count_misses(*chain);
    return nullptr;
  }
  const unsigned shard = Counter::shard();
  for (size_t index = 0; index < chain->size(); ++index) {
    const Override& override = *(*chain)[index];
    if (C10_UNLIKELY(scoped) && Scope::is_off(override.identity)) continue;
    const bool asks = override.asks.load(std::memory_order_relaxed);
    if (C10_LIKELY(!asks && !override.condition.passes_first(arguments))) {
      override.misses->add(shard);
      continue;
    }
    // An observer is told who ran, and a profiler, on the long way.
    const bool early = !asks && !observed && override.has_plans != nullptr && !at::hasCallbacks();
    // A plan tells the rest of the condition. To look for one takes longer than most conditions.
    const bool may_replay = early && override.has_plans->load(std::memory_order_relaxed);
    const bool holds = !asks && !may_replay && override.condition.passes_rest(arguments);
    if (asks || may_replay || holds) {
      if (!early) return taken(*chain, index, holds, device);
      if (auto found = taken_early(*chain, index, arguments, holds, device)) return found;
      continue;
    }
    override.misses->add(shard);
  }
  return nullptr;
}

Pending::~Pending() = default;  // here, for the sake of the size of whoever has one

std::unique_ptr<Pending> Router::bypassed() {
  auto found = std::make_unique<Pending>();
  found->bypassed = true;
  return found;
}

std::unique_ptr<Pending> Router::to_observe() {
  auto found = std::make_unique<Pending>();
  found->observed = true;
  return found;
}

// An impl runs outside of the epoch: it may take long, and whoever removes its override must not wait for
// it.
std::unique_ptr<Pending> Router::taken(const Chain& chain, size_t first, bool holds,
                                       c10::Device device) {
  auto found = std::make_unique<Pending>();
  found->holds = holds;
  found->device = device;
  found->rest.assign(chain.begin() + static_cast<std::ptrdiff_t>(first), chain.end());
  return found;
}

std::unique_ptr<Pending> Router::taken_early(const Chain& chain, size_t index,
                                             const Argument* arguments, bool holds,
                                             c10::Device device) const {
  const Override& override = *chain[index];
  using Kind = Impl::Early::Kind;
  const auto early = override.impl->early(override, {arguments, arguments_}, holds);
  if (early.kind == Kind::Declines) return nullptr;
  if (early.kind == Kind::Replays) {
    const Frame frame(this);
    const c10::OptionalDeviceGuard guard(
        device.is_cpu() ? std::optional<c10::Device>() : std::optional<c10::Device>(device));
    auto found = std::make_unique<Pending>();
    if (override.impl->replay_early(override, *early.entry, arguments, found->results)) {
      found->done = true;
      if (C10_UNLIKELY(frame.ended_in_native(found->results, outputs_))) override.fallbacks->add();
      return found;
    }
  }
  return taken(chain, index, /*holds=*/true, device);
}

void Router::count_misses(const Chain& chain) {
  for (const auto& override : chain) {
    if (!Scope::is_off(override->identity)) override->misses->add();
  }
}

void Router::finish(Pending& pending, Call& call, bool observed) {
  if (pending.done) {
    call.answer(pending.results);
    return;
  }
  if (C10_UNLIKELY(pending.observed)) {
    observer_->observe(call, /*kept=*/false, [&] { route(call, /*observed=*/true); });
    return;
  }
  if (!pending.bypassed && try_rest(pending, call, observed)) return;
  native_.call(call.op, call.keyset, &call.stack);
  if (pending.bypassed) Frame::note_native(this, call.stack, outputs_);
}

// Where an impl declines after all, the ones behind it are asked.
bool Router::try_rest(const Pending& pending, Call& call, bool observed) {
  bool holds = pending.holds;
  for (const auto& override : pending.rest) {
    const bool known = std::exchange(holds, false);
    if (!known && Scope::is_off(override->identity)) continue;
    if (C10_UNLIKELY(override->is_placeholder)) {
      if (!override->impl->wants(*override, call)) continue;
      route(call, observed);  // as if it had come now: counted once, by those who stand there now
      return true;
    }
    if ((known || takes(*override, call)) && run(*override, call, pending.device)) return true;
  }
  return false;
}

bool Router::takes(const Override& override, Call& call) {
  if (override.asks.load(std::memory_order_relaxed)) return override.impl->wants(override, call);
  if (override.condition.holds(call.view().data())) return true;
  override.misses->add();
  return false;
}

bool Router::run(const Override& override, Call& call, c10::Device device) {
  const Frame frame(this);
  const c10::OptionalDeviceGuard guard(
      device.is_cpu() ? std::optional<c10::Device>() : std::optional<c10::Device>(device));
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (C10_UNLIKELY(record.isActive())) record.before(override.label);
  call.ran = &override;
  if (!override.impl->run(override, call, device)) {
    call.ran = nullptr;
    return false;
  }
  if (C10_UNLIKELY(frame.ended_in_native(call.stack, outputs_))) {
    override.fallbacks->add();
    call.fell_back = true;
  }
  return true;
}

void Router::differentiate(c10::DispatchKeySet keyset, torch::jit::Stack* stack) {
  Call call{op_, keyset, *stack, arguments_};
  const bool grad = c10::GradMode::is_enabled();
  const bool opaque = all_tensors(call.view(), [grad](const c10::TensorImpl& tensor) {
    return !(grad && tensor.requires_grad()) && !has_tangent(tensor);
  });
  if (!opaque) {
    const auto compose = [&] { composite_->call(op_, keyset, stack); };
    if (C10_UNLIKELY(Scope::any()) && Scope::is_observed()) {
      observer_->observe(call, /*kept=*/true, compose);
    } else {
      compose();
    }
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  op_.redispatchBoxed(keyset & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace opgraft
