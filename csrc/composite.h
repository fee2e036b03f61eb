// Composite ops (CompositeImplicitAutograd), and what torch would do for the ops that they call
// when an impl runs instead of those.
//
// A composite op runs at the autograd key. Autograd differentiates the ops that it calls, tracks
// their views and counts their writes; dispatch modes and tensor subclasses see them one by one. So
// the router is registered at that key too. A call that no override takes runs the composite there,
// as without opgraft. A call that one takes runs below autograd, which then sees neither its writes
// nor its views. They are reported here.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "argument.h"

namespace opgraft {

// What intercepts a call between autograd and the backend's kernel.
enum class Interceptor : uint8_t {
  None,    // the backend's kernel is the next one
  Tracer,  // torch.compile or opgraft.explain, which must see the op whole
  Other,   // a dispatch mode, subclass, functorch, lazy bits, or torch.compile under autocast: they
           // see the decomposition
};
Interceptor interceptor_of(c10::DispatchKeySet keyset, c10::DispatchKey backend);

// Registers the type of a dispatch mode that sees composite ops whole, not decomposed. Needs the
// GIL.
void register_tracing_mode(void* mode_type) noexcept;

// Whether an op's schema declares that it writes to or returns (a view of) an argument.
bool writes_or_aliases(const c10::FunctionSchema& schema);

// Whether autograd can differentiate any of an impl's results; Never: none is of floating point.
enum class Derived : uint8_t { Yes, No, Never };
Derived derivative_of(c10::ArrayRef<c10::IValue> results);

// Tells autograd what an impl did below it. Created before the impl runs, finished after.
class AutogradBookkeeping {
 public:
  AutogradBookkeeping(const c10::FunctionSchema& schema, c10::ArrayRef<Argument> arguments);

  // Bumps the versions of written arguments, and makes views of results that alias an argument. The
  // results are the last values of the stack.
  void finish(torch::jit::Stack& stack, size_t outputs, const std::string& op) const;

 private:
  struct Input {
    at::Tensor tensor;
    bool written;
  };

  void add_input(const c10::TensorImpl& tensor, bool written);
  void finish(c10::IValue& result, const std::string& op) const;
  at::Tensor tracked_view(const at::Tensor& result, const std::string& op) const;

  c10::SmallVector<Input, 4> inputs_;
};

}  // namespace opgraft
