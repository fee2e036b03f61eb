// The tensors of a call: visiting them, and whether autograd must differentiate the call.
#pragma once

#include <c10/core/GradMode.h>

#include "argument.h"

namespace opgraft {

// Calls `visit` for each tensor until it returns false.
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

// Whether a tensor has a forward-mode tangent.
inline bool has_tangent(const c10::TensorImpl& tensor) {
  if (tensor.autograd_meta() == nullptr) return false;
  const at::Tensor self(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      const_cast<c10::TensorImpl*>(&tensor)));
  return self._fw_grad(/*level=*/0).defined();
}

// Whether a tensor of a call has a forward-mode tangent.
inline bool has_tangents(c10::ArrayRef<Argument> arguments) {
  return !all_tensors(arguments,
                      [](const c10::TensorImpl& tensor) { return !has_tangent(tensor); });
}

// Whether autograd, backward or forward mode, must differentiate a call.
inline bool must_differentiate(c10::ArrayRef<Argument> arguments) {
  const bool grad = c10::GradMode::is_enabled();
  return !all_tensors(arguments, [grad](const c10::TensorImpl& tensor) {
    return !(grad && tensor.requires_grad()) && !has_tangent(tensor);
  });
}

}  // namespace opgraft
