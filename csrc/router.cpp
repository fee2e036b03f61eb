#include "router.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/version.h>

#include <chrono>
#include <thread>
#include <type_traits>
#include <utility>

#include "epochs.h"

namespace opgraft {

const char* const kOrigin = "opgraft router";

namespace {

std::atomic<bool> shutting_down{false};
std::atomic<int> in_python{0};

// --------------------------------------------------------------------------- native kernel capture

// A copy of the kernel inside a SafeKernelFunction, which itself refuses to be called once whoever
// registered the kernel deregisters it. From 2.15 on there is an accessor; before, the member is
// private, and naming it in an explicit instantiation is how C++ lets one reach it.
template <class Safe, class = void>
struct HasAccessor : std::false_type {};
template <class Safe>
struct HasAccessor<Safe, std::void_t<decltype(std::declval<const Safe&>().kernelFunction())>>
    : std::true_type {};

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
template <auto Member>
struct Access {
  friend const c10::KernelFunction& kernel_inside(const c10::SafeKernelFunction& safe) {
    return safe.*Member;
  }
};
const c10::KernelFunction& kernel_inside(const c10::SafeKernelFunction& safe);
template struct Access<&c10::SafeKernelFunction::kernel_>;
#endif

template <class Safe>
c10::KernelFunction kernel_of(const Safe& safe) {
  if constexpr (HasAccessor<Safe>::value) {
    return safe.kernelFunction();
  } else {
    return kernel_inside(safe);
  }
}

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

template <class Functor>
void put(const std::string& name_space, const std::string& name, c10::DispatchKey key,
         std::unique_ptr<Functor> kernel) {
  const WithoutOurWarning quiet;
  // Never destroyed: the registration stays, and the dispatcher may be gone before our statics.
  auto* library =
      new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
  library->impl(name.c_str(),
                torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)).debug(kOrigin));
}

struct RouterKernel final : c10::OperatorKernel {
  explicit RouterKernel(std::shared_ptr<Router> router) : router(std::move(router)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    (*router)(op, keyset, stack);
  }
  std::shared_ptr<Router> router;
};

struct AutogradKernel final : c10::OperatorKernel {
  explicit AutogradKernel(std::shared_ptr<Router> router) : router(std::move(router)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    router->differentiate(keyset, stack);
  }
  std::shared_ptr<Router> router;
};

// --------------------------------------------------------------------------- the call's tensors

template <class Visit>
bool all_tensors(const Call& call, Visit&& visit) {
  for (const c10::IValue* value = call.begin(); value != call.end(); ++value) {
    if (value->isTensor()) {
      if (!visit(*value->unsafeToTensorImpl())) return false;
    } else if (value->isList()) {
      for (const c10::IValue& item : value->toListRef()) {
        if (!item.isTensor()) break;  // a list of tensors has tensors first, or None among them
        if (!visit(*item.unsafeToTensorImpl())) return false;
      }
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
bool is_plain(const Call& call, c10::Device& device) {
  std::optional<c10::Device> found;
  std::optional<c10::Device> scalar;
  const bool plain = all_tensors(call, [&](const c10::TensorImpl& tensor) {
    if (&tensor == static_cast<c10::TensorImpl*>(c10::UndefinedTensorImpl::singleton())) return true;
    if (tensor.key_set().has_any(kLazy) || tensor.has_symbolic_sizes_strides()) return false;
    const c10::Device here = tensor.device();
    if (here.is_cpu() && tensor.dim() == 0) {
      scalar = here;
      return true;
    }
    if (!found) found = here;
    return *found == here;
  });
  device = found ? *found : scalar.value_or(c10::Device(c10::DeviceType::CPU));
  return plain;
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
    : op_(std::move(op)),
      name_(c10::toString(op_.operator_name())),
      key_(key),
      arguments_(op_.schema().arguments().size()),
      outputs_(op_.schema().returns().size()),
      native_(op_, key),
      observer_(std::move(observer)) {
  const bool composite = !op_.hasKernelForDispatchKey(key) &&
                         op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if (composite) {
    composite_.emplace(op_, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)));
  }
  chain_.store(new Chain(), std::memory_order_release);
}

std::shared_ptr<Router> Router::install(const std::string& name, const std::string& overload,
                                        const std::string& dispatch_key,
                                        std::unique_ptr<Observer> observer) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto key = c10::parseDispatchKey(dispatch_key);
  auto router = std::make_shared<Router>(std::move(op), key, std::move(observer));
  const std::string name_space = name.substr(0, name.find("::"));
  const std::string full = overload.empty() ? name : name + "." + overload;
  // The companion first: it captured the composite before the backend's kernel hides it.
  if (router->composite_) {
    put(name_space, full, c10::getAutogradKeyFromBackend(c10::toBackendComponent(key)),
        std::make_unique<AutogradKernel>(router));
  }
  put(name_space, full, key, std::make_unique<RouterKernel>(router));
  return router;
}

void Router::publish(Chain chain) {
  const auto* fresh = new Chain(std::move(chain));
  const auto* old = chain_.exchange(fresh, std::memory_order_seq_cst);
  Epochs::instance().retire([old] { delete old; });
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
  in_python.fetch_add(1, std::memory_order_seq_cst);
  allowed_ = !shutting_down.load(std::memory_order_seq_cst);
}

Router::InPython::~InPython() {
  in_python.fetch_sub(1, std::memory_order_seq_cst);
}

void Router::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                        torch::jit::Stack* stack) {
  if (C10_UNLIKELY(Frame::bypasses(this, name_))) {
    native_.call(op, keyset, stack);
    Frame::note_native(this, *stack, outputs_);
    return;
  }
  Call call{op, keyset, *stack, arguments_};
  // An op of another library can be defined anew, with other arguments: then we know nothing of it.
  const bool known = C10_LIKELY(op.schema().arguments().size() == arguments_);
  if (known && try_chain(call)) return;
  native_.call(op, keyset, stack);
}

// The chain is read inside the epoch, but an impl runs outside: it may take long, and whoever removes
// its override must not wait for it. Where an impl declines after all, the ones behind it are asked.
bool Router::try_chain(Call& call, bool observed) {
  c10::Device device(c10::DeviceType::CPU);
  Chain rest;  // the first override that may take the call, and those behind it
  bool holds = false;
  {
    const Epochs::Reader reader;
    const Chain& chain = *chain_.load(std::memory_order_seq_cst);
    if (chain.empty() || C10_UNLIKELY(shutting_down.load(std::memory_order_relaxed))) return false;
    const bool scoped = C10_UNLIKELY(Scope::any());
    if (scoped && !observed && Scope::is_observed()) {
      observe(call);
      return true;
    }
    if (!is_plain(call, device)) {
      for (const auto& override : chain) {
        if (!scoped || !Scope::is_off(override->identity)) override->misses->add();
      }
      return false;
    }
    const unsigned shard = Counter::shard();
    size_t index = 0;
    for (; index < chain.size(); ++index) {
      const Override& override = *chain[index];
      if (scoped && Scope::is_off(override.identity)) continue;
      if (override.asks.load(std::memory_order_relaxed)) break;
      holds = !override.condition || override.condition->holds(call.begin());
      if (holds) break;
      override.misses->add(shard);
    }
    if (C10_LIKELY(index == chain.size())) return false;
    rest.assign(chain.begin() + static_cast<std::ptrdiff_t>(index), chain.end());
  }
  if (holds && run(*rest.front(), call, device)) return true;
  for (size_t index = holds ? 1 : 0; index < rest.size(); ++index) {
    if (Scope::is_off(rest[index]->identity)) continue;
    if (takes(*rest[index], call) && run(*rest[index], call, device)) return true;
  }
  return false;
}

void Router::observe(Call& call) {
  observer_->observe(call, /*kept=*/false, [&] {
    if (!try_chain(call, /*observed=*/true)) native_.call(call.op, call.keyset, &call.stack);
  });
}

bool Router::takes(const Override& override, Call& call) {
  if (override.asks.load(std::memory_order_relaxed)) return override.impl->wants(override, call);
  if (!override.condition || override.condition->holds(call.begin())) return true;
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
  const bool opaque = all_tensors(call, [grad](const c10::TensorImpl& tensor) {
    if (&tensor == static_cast<c10::TensorImpl*>(c10::UndefinedTensorImpl::singleton())) return true;
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
