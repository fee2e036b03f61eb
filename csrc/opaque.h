// Ops of the `opgraft` namespace, each of which replaces another op in compiled graphs.
#pragma once

#include <string>

namespace opgraft {

// Registers kernels for `name`, an op without kernels, that forward to `origin`, which has the same
// schema. At a backend's key the call is redispatched to `origin` at that key. A call that must be
// differentiated, or that functorch batches, becomes a new call of `origin`.
void forward_op(const std::string& name, const std::string& overload, const std::string& origin,
                const std::string& origin_overload);

}  // namespace opgraft
