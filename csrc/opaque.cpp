#include "opaque.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "registration.h"
#include "router.h"
#include "tensors.h"
#include "threads.h"

namespace opgraft {

namespace {

template <class Functor>
void register_kernel(const c10::OperatorHandle& op, c10::DispatchKey key,
                     std::unique_ptr<Functor> kernel) {
  // Never destroyed: graphs may call it as long as the process lives.
  new Registration(op, key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)));
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// Copies results that alias an argument. A composite op may return its argument without declaring
// it. A compiler relies on the schema of the op that replaces it, and would reuse the argument's
// memory.
class UnaliasedResults {
 public:
  UnaliasedResults(const c10::OperatorHandle& origin, torch::jit::Stack& stack)
      : stack_(stack), outputs_(origin.schema().returns().size()) {
    if (!is_composite(origin)) return;
    for (size_t i = stack.size() - origin.schema().arguments().size(); i < stack.size(); ++i) {
      hold(stack[i]);
    }
  }

  // Copies the results that are in an argument's memory, after the call.
  void copy_aliased() const {
    if (argument_storages_.empty()) return;
    for (size_t i = stack_.size() - outputs_; i < stack_.size(); ++i) {
      stack_[i] = without_alias(std::move(stack_[i]));
    }
  }

 private:
  void hold(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
      argument_storages_.push_back(value.toTensor().storage());
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) hold(item);
    }
  }
  c10::IValue without_alias(c10::IValue value) const {
    if (value.isTensorList()) {
      c10::List<at::Tensor> items;
      for (const at::Tensor& item : value.toTensorList()) items.push_back(without_alias(item));
      return items;
    }
    return value.isTensor() ? c10::IValue(without_alias(value.toTensor())) : value;
  }
  at::Tensor without_alias(const at::Tensor& tensor) const {
    if (!is_aliased(tensor)) return tensor;
    const Frame frame("aten::clone");  // this call is ours: no override takes it
    return tensor.clone();
  }
  bool is_aliased(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return false;
    return std::any_of(
        argument_storages_.begin(), argument_storages_.end(), [&](const c10::Storage& each) {
          return each.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
        });
  }

  torch::jit::Stack& stack_;
  size_t outputs_;
  std::vector<c10::Storage> argument_storages_;
};

struct BackendKernel final : c10::OperatorKernel {
  explicit BackendKernel(NamedOp named) : named(std::move(named)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    const auto& origin = named.get();
    const UnaliasedResults unaliased(origin, *stack);
    origin.redispatchBoxed(keyset, stack);
    unaliased.copy_aliased();
  }
  NamedOp named;
};

struct FunctorchKernel final : c10::OperatorKernel {
  explicit FunctorchKernel(NamedOp named) : named(std::move(named)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    named.get().callBoxed(stack);
  }
  NamedOp named;
};

bool is_backend_next(c10::DispatchKeySet keyset) {
  const auto next = (keyset & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId();
  return c10::toFunctionalityKey(next) == c10::DispatchKey::Dense;
}

// Compiled graphs are not differentiated, but an exported program that contains these ops may be
// trained. For a composite op, `origin` is called at the autograd key, unless something between
// autograd and the backend must see the op that replaces it.
struct AutogradKernel final : c10::OperatorKernel {
  explicit AutogradKernel(NamedOp named) : named(std::move(named)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    const auto& origin = named.get();
    const auto arguments = torch::jit::last(*stack, origin.schema().arguments().size());
    if (must_differentiate(view(arguments)) || (is_composite(origin) && is_backend_next(keyset))) {
      const UnaliasedResults unaliased(origin, *stack);
      origin.callBoxed(stack);
      unaliased.copy_aliased();
      return;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keyset & c10::after_ADInplaceOrView_keyset, stack);
  }
  NamedOp named;
};

}  // namespace

void forward_op(const std::string& name, const std::string& overload, const std::string& origin,
                const std::string& origin_overload) {
  const NamedOp op(
      c10::Dispatcher::singleton().findSchemaOrThrow(origin.c_str(), origin_overload.c_str()));
  const auto opaque =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  register_kernel(opaque, c10::DispatchKey::CompositeExplicitAutograd,
                  std::make_unique<BackendKernel>(op));
  register_kernel(opaque, c10::DispatchKey::Autograd, std::make_unique<AutogradKernel>(op));
  register_kernel(opaque, c10::DispatchKey::FuncTorchBatched,
                  std::make_unique<FunctorchKernel>(op));
}

}  // namespace opgraft
