#include "composite.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <utility>
#include <vector>

#include "threads.h"

namespace opgraft {

namespace {

std::atomic<void*> tracing_mode{nullptr};

// Autocast casts for the ops that a composite op calls, so they need the caller's autocast. What a
// compiler makes of an op that it sees whole, it makes and runs without autocast.
bool sees_autocast(c10::DispatchKey backend) {
  const auto autocast = c10::getAutocastRelatedKeySetFromBackend(c10::toBackendComponent(backend));
  return !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(autocast);
}

bool is_traced(c10::DispatchKey backend) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  if (Modes::get_mode(c10::impl::TorchDispatchModeKey::FUNCTIONAL)) return !sees_autocast(backend);
  const void* type = tracing_mode.load(std::memory_order_acquire);
  if (type == nullptr) return false;
  for (int64_t i = Modes::stack_len(); i-- > 0;) {
    const PyObject* mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (Py_TYPE(mode) == type) return true;  // modes on the stack are alive
  }
  return false;
}

const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

void register_tracing_mode(void* mode_type) noexcept {
  tracing_mode.store(mode_type, std::memory_order_release);
}

Interceptor interceptor_of(c10::DispatchKeySet keyset, c10::DispatchKey backend) {
  const auto next = (keyset & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId();
  if (C10_LIKELY(next == backend)) return Interceptor::None;
  return keyset.has(c10::DispatchKey::Python) && is_traced(backend) ? Interceptor::Tracer
                                                                    : Interceptor::Other;
}

bool writes_or_aliases(const c10::FunctionSchema& schema) {
  for (const auto* side : {&schema.arguments(), &schema.returns()}) {
    for (const auto& each : *side) {
      if (each.alias_info() != nullptr) return true;
    }
  }
  return false;
}

Derived derivative_of(c10::ArrayRef<c10::IValue> results) {
  auto found = Derived::Never;
  const auto look_at = [&found](const at::Tensor& tensor) {
    if (!tensor.defined() || !(tensor.is_floating_point() || tensor.is_complex())) return;
    if (found != Derived::Yes) found = tensor.requires_grad() ? Derived::Yes : Derived::No;
  };
  for (const c10::IValue& result : results) {
    if (result.isTensor()) look_at(result.toTensor());
    if (!result.isTensorList()) continue;
    for (const at::Tensor& each : result.toTensorVector()) look_at(each);
  }
  return found;
}

AutogradBookkeeping::AutogradBookkeeping(const c10::FunctionSchema& schema,
                                         c10::ArrayRef<Argument> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    const Argument& argument = arguments[i];
    if (const auto* tensor = argument.tensor()) add_input(*tensor, written);
    if (!argument.may_hold_tensors()) continue;
    for (size_t item = 0; item < argument.size(); ++item) {
      const Argument each = argument.item(item);
      if (const auto* tensor = each.tensor()) add_input(*tensor, written);
    }
  }
}

void AutogradBookkeeping::add_input(const c10::TensorImpl& tensor, bool written) {
  inputs_.push_back(
      {at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
           const_cast<c10::TensorImpl*>(&tensor))),
       written});
  // As the op's own ops would, raise an error outside of inference mode before anything is written.
  const at::Tensor& added = inputs_.back().tensor;
  if (written && added.is_inference()) added.unsafeGetTensorImpl()->bump_version();
}

void AutogradBookkeeping::finish(torch::jit::Stack& stack, size_t outputs,
                                 const std::string& op) const {
  for (const Input& input : inputs_) {
    if (input.written && !input.tensor.is_inference()) {
      input.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  for (size_t i = stack.size() - outputs; i < stack.size(); ++i) finish(stack[i], op);
}

void AutogradBookkeeping::finish(c10::IValue& result, const std::string& op) const {
  if (result.isTensor()) {
    at::Tensor made = tracked_view(result.toTensor(), op);
    if (!made.is_same(result.toTensor())) result = std::move(made);
  } else if (result.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& each : result.toTensorVector()) made.push_back(tracked_view(each, op));
    result = std::move(made);
  }
}

at::Tensor AutogradBookkeeping::tracked_view(const at::Tensor& result,
                                             const std::string& op) const {
  if (!result.defined() || result.is_view()) return result;
  const auto* memory = memory_of(result);
  if (memory == nullptr) return result;
  const at::Tensor* base = nullptr;
  for (const Input& input : inputs_) {
    if (input.tensor.is_same(result)) return result;
    if (base == nullptr && memory_of(input.tensor) == memory) base = &input.tensor;
  }
  if (base == nullptr || base->is_inference()) return result;
  const bool same_elements = base->scalar_type() == result.scalar_type() &&
                             base->is_conj() == result.is_conj() &&
                             base->is_neg() == result.is_neg();
  TORCH_CHECK(same_elements, "an override of ", op,
              " returned the memory of an argument with another dtype, conjugate or negative bit, "
              "which autograd cannot track; return a new tensor, or leave such calls to the native "
              "kernel");
  const Frame frame("aten::as_strided");  // this call is ours: no override takes it
  return at::as_strided(*base, result.sizes(), result.strides(), result.storage_offset());
}

}  // namespace opgraft
