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

#include "epochs.h"
#include "tensors.h"
#include "torch_private.h"
#include "typed.h"

namespace opgraft {

const char* const kOrigin = "opgraft router";

namespace {

std::atomic<bool> shutting_down{false};
std::atomic<int> in_python{0};
thread_local int here_in_python = 0;

// --------------------------------------------------------------------------- registration

// torch warns once per process when a kernel replaces another. `WarnAlways` leaves the once-flag
// for others, and the handler, which is the thread's own, takes our warning out.
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

// Whether calls come as C++ arguments.
bool put(Router& router, c10::DispatchKey key, bool at_autograd) {
  const auto& native = at_autograd ? router.composite() : router.native();
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
      std::make_unique<RouterKernel>(router, at_autograd));
  std::optional<c10::impl::CppSignature> signature;
  if (const auto made = typed_function(router.op(), native)) {
    set_unboxed(kernel, made->function, made->takes_symbolic_sizes);
    signature = made->signature;
  }
  const bool typed = signature.has_value();
  put(router.op(), key, std::move(kernel), std::move(signature));
  return typed;
}

// --------------------------------------------------------------------------- the call's tensors

// Keys under which a tensor's memory does not hold its values, or it has none to speak of.
const c10::DispatchKeySet kLazy{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
                                c10::DispatchKey::Functionalize};

// Whether an impl may see the call: its tensors live on one device (0-dim CPU tensors aside), hold
// their values in memory and have sizes that are numbers. Tells the device, if a tensor is on one.
bool is_plain(c10::ArrayRef<Argument> arguments, c10::Device& device, bool& found) {
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

}  // namespace

// --------------------------------------------------------------------------- NativeKernel

NativeKernel::NativeKernel(const c10::OperatorHandle& op, c10::DispatchKey key) : key_(key) {
  if (!op.hasComputedKernelForDispatchKey(key)) return;
  const auto safe = op.getComputedKernelForDispatchKey(key);
  kernel_ = kernel_of(safe);
  origin_ = safe.debug();
}

void NativeKernel::missing(const c10::OperatorHandle& op) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(), " has no native kernel at ", c10::toString(key_),
      ", and no override took the call; opgraft.explain('", op.operator_name(), "', ...) says why");
}

bool BoxedImpl::run(const Override& override, Call& call, c10::Device) {
  override.hits->add();
  const AsAKernel as_a_kernel(call.excluded);
  function_(call.op, call.impl_keyset(), &call.stack);
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
      device_type_(c10::dispatchKeyToDeviceType(key)),
      observer_(std::move(observer)) {
  // A kernel for all backends is made of other ops, which go through autocast: so do its impls'.
  const bool own = op_.hasKernelForDispatchKey(key);
  if (own) excluded_ = c10::autocast_dispatch_keyset;
  if (!own && op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    composite_.emplace(op_, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)));
    writes_or_aliases_ = writes_or_aliases(op_.schema());
    excluded_ = excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
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
  // The autograd key first: the backend's kernel hides the composite.
  if (router->composite_) {
    put(*router, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)),
        /*at_autograd=*/true);
  }
  router->typed_ = put(*router, key, /*at_autograd=*/false);
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

// Counted before the flag is read, and the flag is set before the count is read: whoever is allowed
// is waited for.
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
                        torch::jit::Stack* stack, bool at_autograd) {
  Call call{op, keyset, *stack, arguments_};
  std::unique_ptr<Pending> found;
  // An op of another library can be defined anew, with other arguments: then we know nothing of it.
  if (C10_LIKELY(op.schema().arguments().size() == arguments_)) {
    const auto arguments = call.view();
    found = at_autograd ? pending_at_autograd(arguments.data(), keyset) : pending(arguments.data());
  }
  if (found) {
    finish(*found, call);
  } else if (C10_UNLIKELY(keyset.has(c10::DispatchKey::PythonDispatcher))) {
    run_native(call);
  } else {
    (at_autograd ? *composite_ : native_).call(op, keyset, stack);
  }
}

// torch has decompositions in Python of some composite ops, for traces: its dispatcher in Python
// takes them for an op without kernels at the backend and its autograd key, which ours are.
void Router::run_native(Call& call) const {
  const bool traced = composite_ && call.keyset.has(c10::DispatchKey::PythonDispatcher) &&
                      call.keyset.has_any(c10::autograd_dispatch_keyset);
  if (C10_UNLIKELY(traced) && call.op.schema().arguments().size() == arguments_ &&
      observer_->decompose(call)) {
    return;
  }
  native(call.keyset).call(call.op, call.keyset, &call.stack);
}

void Router::route(Call& call, bool observed) {
  if (const auto found = pending(call.view().data(), observed)) {
    finish(*found, call, observed);
  } else {
    run_native(call);
  }
}

// What must be differentiated, and what somebody between autograd and the backend wants to see the
// pieces of, is the composite's, whatever the conditions say.
std::unique_ptr<Pending> Router::pending_at_autograd(const Argument* arguments,
                                                     c10::DispatchKeySet keyset) const {
  if (Frame::bypasses(this, name_)) return ended(Pending::End::Bypassed);
  if (chain_.load(std::memory_order_relaxed) == nullptr) return nullptr;
  const bool kept = must_differentiate({arguments, arguments_});
  const Between found = kept ? Between::Others : between(keyset, key_);
  if (C10_LIKELY(!kept && found == Between::Nothing)) return pending(arguments);
  if (!kept && found == Between::Tracer && !writes_or_aliases_) return ended(Pending::End::Whole);
  if (C10_UNLIKELY(Scope::any()) && Scope::is_observed()) {
    return ended(kept ? Pending::End::ObservedKept : Pending::End::ObservedLeft);
  }
  if (!kept) count_misses();
  return nullptr;
}

// Every call runs this, with caches that the op itself has filled: what is rare is out of the way.
std::unique_ptr<Pending> Router::pending(const Argument* arguments, bool observed) const {
  if (Frame::bypasses(this, name_)) return ended(Pending::End::Bypassed);
  if (chain_.load(std::memory_order_relaxed) == nullptr) return nullptr;
  const Epochs::Reader reader;
  const Chain* chain = chain_.load(std::memory_order_seq_cst);
  if (C10_UNLIKELY(chain == nullptr || shutting_down.load(std::memory_order_relaxed)))
    return nullptr;
  const bool scoped = Scope::any();
  if (C10_UNLIKELY(scoped) && !observed && Scope::is_observed()) {
    return ended(Pending::End::Observed);
  }
  c10::Device device(c10::DeviceType::CPU);
  bool placed = false;
  if (C10_UNLIKELY(!is_plain(c10::ArrayRef<Argument>(arguments, arguments_), device, placed))) {
    count_misses(*chain);
    return nullptr;
  }
  Counter::Shard& shard = Counter::shard();
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
      if (C10_UNLIKELY(!placed)) device = device_without_tensors(arguments);
      if (!early) return taken(*chain, index, holds, device);
      if (auto found = taken_early(*chain, index, arguments, holds, device)) return found;
      continue;
    }
    override.misses->add(shard);
  }
  return nullptr;
}

Pending::~Pending() = default;  // here, for the sake of the size of whoever has one

// Where a call works that has no tensors, or only numbers that are 0-dim CPU tensors: an op that
// makes tensors says so, or means the current device of the router's key.
c10::Device Router::device_without_tensors(const Argument* arguments) const {
  if (!c10::impl::hasDeviceGuardImpl(device_type_)) return c10::Device(c10::DeviceType::CPU);
  for (size_t index = 0; index < arguments_; ++index) {
    if (arguments[index].kind() != Argument::Kind::Device) continue;
    if (const auto given = arguments[index].device(); given.type() == device_type_) return given;
  }
  return c10::Device(device_type_);
}

std::unique_ptr<Pending> Router::ended(Pending::End end) {
  auto found = std::make_unique<Pending>();
  found->end = end;
  return found;
}

// An impl runs outside of the epoch (Note [Epochs]): it may take long, and whoever removes its
// override must not wait for it.
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
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::optional<c10::Device>()
                                                         : std::optional<c10::Device>(device));
    auto found = std::make_unique<Pending>();
    std::optional<Bookkeeping> books;
    if (C10_UNLIKELY(composite_.has_value())) books = bookkeeping({arguments, arguments_});
    if (replay_early(override, *early.entry, arguments, found->results)) {
      found->end = Pending::End::Replayed;
      if (C10_UNLIKELY(frame.ended_in_native(found->results, outputs_))) override.fallbacks->add();
      if (C10_UNLIKELY(books.has_value())) books->settle(found->results, outputs_, name_);
      return found;
    }
  }
  return taken(chain, index, /*holds=*/true, device);
}

bool Router::replay_early(const Override& override, const PlanEntry& entry,
                          const Argument* arguments, torch::jit::Stack& results) const {
  const AsAKernel as_a_kernel(excluded_);
  return override.impl->replay_early(override, entry, arguments, results);
}

void Router::count_misses() const {
  const Epochs::Reader reader;
  if (const Chain* chain = chain_.load(std::memory_order_seq_cst)) count_misses(*chain);
}

void Router::count_misses(const Chain& chain) {
  for (const auto& override : chain) {
    if (!Scope::is_off(override->identity)) override->misses->add();
  }
}

void Router::finish(Pending& pending, Call& call, bool observed) {
  using End = Pending::End;
  const auto run_native = [&] {
    this->run_native(call);
  };
  switch (pending.end) {
    case End::Replayed:
      call.answer(pending.results);
      return;
    case End::Taken:
      if (!try_rest(pending, call, observed)) run_native();
      return;
    case End::Bypassed:
      run_native();
      Frame::note_native(this, call.stack, outputs_);
      return;
    case End::Observed:
      observer_->observe(call, /*kept=*/false, [&] { route(call, /*observed=*/true); });
      return;
    case End::ObservedLeft:
      observer_->observe(call, /*kept=*/false, [&] {
        count_misses();
        run_native();
      });
      return;
    case End::ObservedKept:
      observer_->observe(call, /*kept=*/true, run_native);
      return;
    case End::Whole:
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(call.keyset & c10::after_ADInplaceOrView_keyset, &call.stack);
      return;
  }
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
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::optional<c10::Device>()
                                                       : std::optional<c10::Device>(device));
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (C10_UNLIKELY(record.isActive())) record.before(override.label);
  std::optional<Bookkeeping> books;
  if (C10_UNLIKELY(composite_.has_value())) books = bookkeeping(call.view());
  call.ran = &override;
  call.excluded = excluded_;
  if (!override.impl->run(override, call, device)) {
    call.ran = nullptr;
    return false;
  }
  if (C10_UNLIKELY(frame.ended_in_native(call.stack, outputs_))) {
    override.fallbacks->add();
    call.fell_back = true;
  }
  if (books) books->settle(call.stack, outputs_, name_);
  return true;
}

std::optional<Bookkeeping> Router::bookkeeping(c10::ArrayRef<Argument> arguments) const {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView))
    return std::nullopt;
  return std::make_optional<Bookkeeping>(op_.schema(), arguments);
}

}  // namespace opgraft
