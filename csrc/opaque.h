// Ops of the `opgraft` namespace, each of which stands for another op in compiled graphs.
#pragma once

#include <string>

namespace opgraft {

// Gives `name`, an op that is defined and has no kernel, the kernels of `origin`, which has the
// same schema: at a backend's key the call goes on to `origin` at that key; one that must be
// differentiated or is batched by functorch starts anew as a call of `origin`.
void stand_for(const std::string& name, const std::string& overload, const std::string& origin,
               const std::string& origin_overload);

}  // namespace opgraft
