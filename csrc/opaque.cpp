#include "opaque.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "router.h"
#include "tensors.h"
#include "threads.h"

namespace opgraft {

namespace {

template <class Functor>
void put(const std::string& name, c10::DispatchKey key, std::unique_ptr<Functor> kernel) {
  const auto name_space = name.substr(0, name.find("::"));
  // Never destroyed, like the routers' own.
  auto* library = new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
  library->impl(name.c_str(),
                torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)).debug(kOrigin));
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// A composite op may return its argument without saying so in its schema. A compiler takes the op
// that stands for it by its word, and uses the argument's memory again.
class FreshResults {
 public:
  FreshResults(const c10::OperatorHandle& origin, torch::jit::Stack& stack)
      : stack_(stack), outputs_(origin.schema().returns().size()) {
    if (!is_composite(origin)) return;
    for (size_t i = stack.size() - origin.schema().arguments().size(); i < stack.size(); ++i) {
      hold(stack[i]);
    }
  }

  // After the call: copies what lies in an argument's memory.
  void settle() const {
    if (held_.empty()) return;
    for (size_t i = stack_.size() - outputs_; i < stack_.size(); ++i) {
      if (stack_[i].isTensor() && is_held(stack_[i].toTensor())) {
        const Frame frame("aten::clone");  // ours, and no call for its overrides
        stack_[i] = stack_[i].toTensor().clone();
      }
    }
  }

 private:
  void hold(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
      held_.push_back(value.toTensor().storage());
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) hold(item);
    }
  }
  bool is_held(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return false;
    return std::any_of(held_.begin(), held_.end(), [&](const c10::Storage& each) {
      return each.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
    });
  }

  torch::jit::Stack& stack_;
  size_t outputs_;
  std::vector<c10::Storage> held_;
};

struct AtBackend final : c10::OperatorKernel {
  explicit AtBackend(c10::OperatorHandle origin) : origin(std::move(origin)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    const FreshResults fresh(origin, *stack);
    origin.redispatchBoxed(keyset, stack);
    fresh.settle();
  }
  c10::OperatorHandle origin;
};

struct FromTheTop final : c10::OperatorKernel {
  explicit FromTheTop(c10::OperatorHandle origin) : origin(std::move(origin)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    origin.callBoxed(stack);
  }
  c10::OperatorHandle origin;
};

bool is_next_to_a_backend(c10::DispatchKeySet keyset) {
  const auto next = (keyset & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId();
  return c10::toFunctionalityKey(next) == c10::DispatchKey::Dense;
}

// A compiled graph differentiates nothing, but an exported program that was asked to hold these ops
// may be trained. A composite op runs at the autograd key, once nobody is there any more who wants
// to see the op that stands for it.
struct AtAutograd final : c10::OperatorKernel {
  explicit AtAutograd(c10::OperatorHandle origin) : origin(std::move(origin)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, origin.schema().arguments().size());
    if (must_differentiate(view(arguments)) ||
        (is_composite(origin) && is_next_to_a_backend(keyset))) {
      const FreshResults fresh(origin, *stack);
      origin.callBoxed(stack);
      fresh.settle();
      return;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keyset & c10::after_ADInplaceOrView_keyset, stack);
  }
  c10::OperatorHandle origin;
};

}  // namespace

void stand_for(const std::string& name, const std::string& overload, const std::string& origin,
               const std::string& origin_overload) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(origin.c_str(), origin_overload.c_str());
  const auto full = overload.empty() ? name : name + "." + overload;
  put(full, c10::DispatchKey::CompositeExplicitAutograd, std::make_unique<AtBackend>(op));
  put(full, c10::DispatchKey::Autograd, std::make_unique<AtAutograd>(op));
  put(full, c10::DispatchKey::FuncTorchBatched, std::make_unique<FromTheTop>(op));
}

}  // namespace opgraft
