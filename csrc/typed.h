// Routers that are called with C++ arguments: for an op whose native kernel has one of the
// signatures that csrc/signatures.h lists.
//
// Note [Typed calls]
// A call that no override wants costs no boxing: nothing is allocated, and no tensor is referenced,
// for which torch may have to ask for the GIL (c10/util/intrusive_ptr.h). Others are boxed, and go
// on as boxed calls do. A boxed call of such an op never sees the typed kernel.
#pragma once

#include <ATen/core/dispatch/CppSignature.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace opgraft {

class NativeKernel;

// What the dispatcher calls with a `RouterKernel`, the dispatch keys and the op's C++ arguments.
struct TypedFunction {
  void* function;
  bool takes_symbolic_sizes;
  c10::impl::CppSignature signature;
};

// A router's in front of a native kernel; none where that one's signature is not listed, or not
// known.
std::optional<TypedFunction> typed_function(const c10::OperatorHandle& op,
                                            const NativeKernel& native);

}  // namespace opgraft
