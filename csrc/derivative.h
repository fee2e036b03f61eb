// Custom derivatives of overrides, at an op's autograd key.
//
// Calls that no such override may take go on without the GIL. Python handles the others. An op with
// a kernel of its own gets a kernel of ours in front of autograd's. A composite op's router is at
// the autograd key already, and asks there.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "condition.h"
#include "python_impl.h"
#include "router.h"

namespace opgraft {

class Derivative {
 public:
  // The conditions of the overrides with a derivative; nullopt if Python must evaluate it.
  using Conditions = std::vector<std::optional<Condition>>;

  // Registers a kernel in front of the one at the autograd key of a router's backend.
  static std::shared_ptr<Derivative> install(Router& router);

  explicit Derivative(const c10::OperatorHandle& op);

  void publish(Conditions conditions);

  // Who makes the result of a call.
  enum class By {
    Override,       // an override, with its derivative
    OwnDerivative,  // the op with its own derivative; below autograd it is routed as any call
    Native,         // the native kernels alone, since an override is not ready
  };

  // hook(keyset, values, key) returns the call's result; NotImplemented to use the op's own
  // derivative; or Ellipsis for native kernels alone. `key`: the `PlanKey`, None if there is none.
  void set_hook(py::object hook) { hook_ = PythonRef(std::move(hook)); }

  size_t argument_count() const noexcept { return argument_count_; }

  // Whether an override with a derivative may take a call.
  bool may_differentiate(const Argument* arguments) const;

  // Replaces the arguments on the stack by results. The stack is unchanged if no override makes
  // them.
  By differentiate(c10::DispatchKeySet keyset, torch::jit::Stack& stack) const;

 private:
  py::object key_of(const c10::IValue* arguments) const;

  PythonConverter converter_;
  std::string display_name_;
  size_t argument_count_;
  PythonRef hook_;
  std::atomic<const Conditions*> conditions_{nullptr};
};

}  // namespace opgraft
