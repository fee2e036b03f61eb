#include "composite.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <utility>
#include <vector>

#include "threads.h"

namespace opgraft {

namespace {

std::atomic<void*> whole_ops_mode{nullptr};

bool is_traced() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  if (Modes::get_mode(c10::impl::TorchDispatchModeKey::FUNCTIONAL)) return true;
  const void* type = whole_ops_mode.load(std::memory_order_acquire);
  if (type == nullptr) return false;
  for (int64_t i = Modes::stack_len(); i-- > 0;) {
    const PyObject* mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (Py_TYPE(mode) == type) return true;  // a type does not change, and modes here are alive
  }
  return false;
}

const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

void show_whole_ops_to(void* mode_type) noexcept {
  whole_ops_mode.store(mode_type, std::memory_order_release);
}

Between between(c10::DispatchKeySet keyset, c10::DispatchKey backend) {
  const auto next = (keyset & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId();
  if (C10_LIKELY(next == backend)) return Between::Nothing;
  return keyset.has(c10::DispatchKey::Python) && is_traced() ? Between::Tracer : Between::Others;
}

bool writes_or_aliases(const c10::FunctionSchema& schema) {
  for (const auto* side : {&schema.arguments(), &schema.returns()}) {
    for (const auto& each : *side) {
      if (each.alias_info() != nullptr) return true;
    }
  }
  return false;
}

Bookkeeping::Bookkeeping(const c10::FunctionSchema& schema, c10::ArrayRef<Argument> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    const Argument& argument = arguments[i];
    if (const auto* tensor = argument.tensor()) hold(*tensor, written);
    if (!argument.may_hold_tensors()) continue;
    for (size_t item = 0; item < argument.size(); ++item) {
      const Argument each = argument.item(item);
      if (const auto* tensor = each.tensor()) hold(*tensor, written);
    }
  }
}

void Bookkeeping::hold(const c10::TensorImpl& tensor, bool written) {
  held_.push_back(
      {at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
           const_cast<c10::TensorImpl*>(&tensor))),
       written});
  // As the pieces would have it, before anything is written: an error outside of inference mode.
  const at::Tensor& held = held_.back().tensor;
  if (written && held.is_inference()) held.unsafeGetTensorImpl()->bump_version();
}

void Bookkeeping::settle(torch::jit::Stack& stack, size_t outputs, const std::string& op) const {
  for (const Held& held : held_) {
    if (held.written && !held.tensor.is_inference()) {
      held.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  for (size_t i = stack.size() - outputs; i < stack.size(); ++i) settle(stack[i], op);
}

void Bookkeeping::settle(c10::IValue& result, const std::string& op) const {
  if (result.isTensor()) {
    at::Tensor made = tracked(result.toTensor(), op);
    if (!made.is_same(result.toTensor())) result = std::move(made);
  } else if (result.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& each : result.toTensorVector()) made.push_back(tracked(each, op));
    result = std::move(made);
  }
}

at::Tensor Bookkeeping::tracked(const at::Tensor& result, const std::string& op) const {
  if (!result.defined() || result.is_view()) return result;
  const auto* memory = memory_of(result);
  if (memory == nullptr) return result;
  const at::Tensor* base = nullptr;
  for (const Held& held : held_) {
    if (held.tensor.is_same(result)) return result;
    if (base == nullptr && memory_of(held.tensor) == memory) base = &held.tensor;
  }
  if (base == nullptr || base->is_inference()) return result;
  const bool same_elements = base->scalar_type() == result.scalar_type() &&
                             base->is_conj() == result.is_conj() &&
                             base->is_neg() == result.is_neg();
  TORCH_CHECK(same_elements, "an override of ", op,
              " returned the memory of an argument as elements of another kind, as which autograd "
              "cannot follow it; return a new tensor, or leave such calls to the native kernel");
  const Frame frame("aten::as_strided");  // ours, and no call for its overrides
  return at::as_strided(*base, result.sizes(), result.strides(), result.storage_offset());
}

}  // namespace opgraft
