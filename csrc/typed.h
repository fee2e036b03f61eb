// Routers that are called with C++ arguments: for an op whose native kernel has one of the signatures that
// csrc/signatures.h lists.
//
// A call that no override wants costs no boxing: nothing is allocated, and no tensor is referenced, for
// which torch may have to ask for the GIL (c10/util/intrusive_ptr.h). Others are boxed, and go on as boxed
// calls do. A boxed call of such an op never sees the typed kernel.
#pragma once

#include <ATen/core/dispatch/CppSignature.h>

#include <optional>

namespace opgraft {

class Router;

// What the dispatcher calls with a `RouterKernel`, the dispatch keys and the op's C++ arguments.
struct TypedFunction {
  void* function;
  bool takes_symbolic_sizes;
  c10::impl::CppSignature signature;
};

// The router's; none where the native kernel's signature is not listed, or not known.
std::optional<TypedFunction> typed_function(const Router& router);

}  // namespace opgraft
