// Routers that are called with C++ arguments, for ops whose native kernel has a signature in
// csrc/signatures.h.
//
// Note [Typed calls]
// A call that no override takes is not boxed. So nothing is allocated, and no tensor's reference
// count changes, for which torch may need the GIL (c10/util/intrusive_ptr.h). Other calls are
// boxed, and continue as boxed calls do. A boxed call of such an op never reaches the typed kernel.
#pragma once

#include <ATen/core/dispatch/CppSignature.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace opgraft {

class NativeKernel;

// A function that the dispatcher calls with a `RouterKernel`, the dispatch keys and the op's C++
// arguments.
struct TypedFunction {
  void* function;
  bool takes_symbolic_sizes;
  c10::impl::CppSignature signature;
};

// The function for a router in front of a native kernel; nullopt if that kernel's signature is not
// listed or not known.
std::optional<TypedFunction> typed_function(const c10::OperatorHandle& op,
                                            const NativeKernel& native);

}  // namespace opgraft
