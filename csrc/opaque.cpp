#include "opaque.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <memory>
#include <utility>

#include "router.h"

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

struct AtBackend final : c10::OperatorKernel {
  explicit AtBackend(c10::OperatorHandle origin) : origin(std::move(origin)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    origin.redispatchBoxed(keyset, stack);
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

bool must_differentiate(const at::Tensor& tensor, bool grad) {
  return tensor.defined() && ((grad && tensor.requires_grad()) || tensor._fw_grad(0).defined());
}

bool must_differentiate(const torch::jit::Stack& stack, size_t arguments) {
  const bool grad = c10::GradMode::is_enabled();
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    const auto& value = stack[i];
    if (value.isTensor()) {
      if (must_differentiate(value.toTensor(), grad)) return true;
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && must_differentiate(item.toTensor(), grad)) return true;
      }
    }
  }
  return false;
}

// A compiled graph differentiates nothing, but an exported program that was asked to hold these ops may
// be trained.
struct AtAutograd final : c10::OperatorKernel {
  explicit AtAutograd(c10::OperatorHandle origin) : origin(std::move(origin)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    if (must_differentiate(*stack, origin.schema().arguments().size())) {
      origin.callBoxed(stack);
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
