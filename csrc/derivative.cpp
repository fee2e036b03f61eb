#include "derivative.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "epochs.h"
#include "plan.h"
#include "tensors.h"
#include "threads.h"

namespace opgraft {

namespace {

// With these keys a tensor's sizes may be symbolic, or differ from those that a kernel sees.
const c10::DispatchKeySet kWrapped{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                   c10::DispatchKey::FuncTorchGradWrapper,
                                   c10::DispatchKey::Functionalize};

bool is_wrapped(const c10::TensorImpl& tensor) {
  return tensor.key_set().has_any(kWrapped) || tensor.has_symbolic_sizes_strides();
}

// What autograd needs for the tensors of a call. Ops with custom derivatives have no lists of
// tensors.
struct AutogradNeeds {
  bool backward = false;
  bool forward = false;
  bool wrapped = false;

  AutogradNeeds(const c10::IValue* begin, const c10::IValue* end) {
    const bool grad = c10::GradMode::is_enabled();
    for (; begin != end; ++begin) {
      if (!begin->isTensor() || !begin->toTensor().defined()) continue;
      const at::Tensor& tensor = begin->toTensor();
      backward = backward || (grad && tensor.requires_grad());
      const auto& impl = *begin->unsafeToTensorImpl();
      forward = forward || has_tangent(impl);
      wrapped = wrapped || is_wrapped(impl);
    }
  }
};

// Stands in front of an op's kernel at the autograd key.
class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(std::shared_ptr<Derivative> derivative, Router& router, c10::DispatchKey key)
      : derivative_(std::move(derivative)), router_(router), native_(router.op(), key) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack) {
    if (C10_UNLIKELY(router_.is_outdated())) {
      Call call{op, keyset, *stack, derivative_->argument_count()};
      router_.withdraw(call);
      return;
    }
    const c10::IValue* const end = stack->data() + stack->size();
    const c10::IValue* const begin = end - derivative_->argument_count();
    const AutogradNeeds needs(begin, end);
    if (!needs.backward && !needs.forward && !needs.wrapped) {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keyset & c10::after_ADInplaceOrView_keyset, stack);
      return;
    }
    if (needs.backward && (needs.wrapped || may_differentiate(begin))) {
      const auto by = derivative_->differentiate(keyset, *stack);
      if (by == Derivative::By::Override) return;
      if (by == Derivative::By::Native) {
        // Its forward may be ready, and its backward not.
        const Frame natively(c10::toString(op.operator_name()));
        native_.call(op, keyset, stack);
        return;
      }
    }
    native_.call(op, keyset, stack);
  }

 private:
  bool may_differentiate(const c10::IValue* arguments) const {
    const auto count = derivative_->argument_count();
    return derivative_->may_differentiate(
        view(c10::ArrayRef<c10::IValue>(arguments, count)).data());
  }

  std::shared_ptr<Derivative> derivative_;
  Router& router_;
  NativeKernel native_;
};

}  // namespace

Derivative::Derivative(const c10::OperatorHandle& op)
    : converter_(op.schema()),
      display_name_("the derivative of an override of " + c10::toString(op.operator_name())),
      argument_count_(op.schema().arguments().size()) {
  conditions_.store(new Conditions(), std::memory_order_release);
}

std::shared_ptr<Derivative> Derivative::install(Router& router) {
  const auto backend = c10::toBackendComponent(router.key());
  const auto key = c10::getAutogradKeyFromBackend(backend);
  auto derivative = std::make_shared<Derivative>(router.op());
  router.register_kernel(key, c10::KernelFunction::makeFromBoxedFunctor(
                                  std::make_unique<Kernel>(derivative, router, key)));
  return derivative;
}

void Derivative::publish(Conditions conditions) {
  const auto* fresh = new Conditions(std::move(conditions));
  const auto* old = conditions_.exchange(fresh, std::memory_order_seq_cst);
  Epochs::instance().retire([old] { delete old; });
}

bool Derivative::may_differentiate(const Argument* arguments) const {
  const Epochs::Reader reading;
  for (const auto& condition : *conditions_.load(std::memory_order_seq_cst)) {
    if (!condition || condition->holds(arguments)) return true;
  }
  return false;
}

Derivative::By Derivative::differentiate(c10::DispatchKeySet keyset,
                                         torch::jit::Stack& stack) const {
  const PythonAccess python;
  if (!python) return By::OwnDerivative;
  const auto* const begin = stack.data() + stack.size() - argument_count_;
  const auto values = converter_.to_python(begin);
  const auto keys = py::cast(keyset);
  const auto result = call_python(hook_.get(), keys, values, key_of(begin));
  if (result.is(py::handle(Py_NotImplemented))) return By::OwnDerivative;
  if (result.is(py::handle(Py_Ellipsis))) return By::Native;
  auto results = converter_.to_results(result, display_name_);
  torch::jit::drop(stack, argument_count_);
  for (auto& value : results) stack.push_back(std::move(value));
  return By::Override;
}

// None where a tensor is wrapped: its metadata are not those that a kernel sees.
py::object Derivative::key_of(const c10::IValue* arguments) const {
  const auto all = view(c10::ArrayRef<c10::IValue>(arguments, argument_count_));
  const bool any_wrapped =
      !all_tensors(all, [](const c10::TensorImpl& tensor) { return !is_wrapped(tensor); });
  PlanKey key;
  return !any_wrapped && key.read(all) ? py::cast(key) : py::object(py::none());
}

}  // namespace opgraft
