// The derivative of an op, by another op: no Python runs for either.
#pragma once

#include <string>

namespace opgraft {

// Differentiates an op by another one, whose schema says what it gets and returns, by names.
//
// An argument `grad_NAME` of `backward` is the gradient of the op's output NAME; any other is the
// op's argument or output of that name, which is saved. A result `grad_NAME` is the gradient of the
// op's argument NAME. `opgraft.register_backward` checks the schemas, and refers here.
// Differentiating what `backward` returns is an error, unless it has a derivative of its own.
void register_backward(const std::string& name, const std::string& overload,
                       const std::string& backward, const std::string& backward_overload);

}  // namespace opgraft
