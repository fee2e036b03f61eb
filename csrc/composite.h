// Composite ops (CompositeImplicitAutograd): what torch does for the pieces that such an op is made
// of, and who does it where an impl runs in their place.
//
// A composite op runs at the autograd key: its pieces are differentiated, tracked as views, counted
// as writes, and seen by dispatch modes and tensor subclasses one by one. So the router stands at
// that key too. What no override takes runs the composite there, as if we were not here. What one
// takes goes on below, where nobody keeps books: what the pieces would have noted is noted here.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "argument.h"

namespace opgraft {

// What is between the autograd key and a backend's kernel, for one call.
enum class Between : uint8_t {
  Nothing,  // the backend's kernel is the next one
  Tracer,   // somebody who wants to see the op whole: torch.compile, opgraft.explain
  Others,   // a dispatch mode, a tensor subclass, functorch, lazy bits: they see the pieces
};
Between between(c10::DispatchKeySet keyset, c10::DispatchKey backend);

// A dispatch mode in Python, by its type, that sees composite ops whole. Needs the GIL.
void show_whole_ops_to(void* mode_type) noexcept;

// Whether an op's schema says that it writes to an argument or returns a part of one.
bool writes_or_aliases(const c10::FunctionSchema& schema);

// What autograd has to know of an impl's run below it: made before, settled after.
class Bookkeeping {
 public:
  Bookkeeping(const c10::FunctionSchema& schema, c10::ArrayRef<Argument> arguments);

  // Counts what was written to as written, and makes views of what shares an argument's memory. The
  // results are the last ones of the stack.
  void settle(torch::jit::Stack& stack, size_t outputs, const std::string& op) const;

 private:
  struct Held {
    at::Tensor tensor;
    bool written;
  };

  void hold(const c10::TensorImpl& tensor, bool written);
  void settle(c10::IValue& result, const std::string& op) const;
  at::Tensor tracked(const at::Tensor& result, const std::string& op) const;

  c10::SmallVector<Held, 4> held_;
};

}  // namespace opgraft
