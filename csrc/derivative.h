// Our kernel at an op's autograd key, for overrides with a custom derivative.
//
// Calls that no such override may take go on without the GIL. Python handles the others.
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

  // Registers a kernel in front of the one at a backend's autograd key, for good.
  static std::shared_ptr<Derivative> install(const std::string& name, const std::string& overload,
                                             const std::string& dispatch_key);

  Derivative(c10::OperatorHandle op, c10::DispatchKey key);

  void publish(Conditions conditions);

  // hook(keyset, values) returns the call's result, or NotImplemented to use the op's own
  // derivative.
  void set_hook(py::object hook) { hook_ = PythonRef(std::move(hook)); }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack);

 private:
  bool may_differentiate(const c10::IValue* arguments) const;
  bool differentiate(c10::DispatchKeySet keyset, torch::jit::Stack& stack) const;

  NativeKernel native_;
  PythonConverter converter_;
  std::string display_name_;
  size_t argument_count_;
  bool is_composite_;  // the next kernel is the op's router, which is at the autograd key too
  PythonRef hook_;
  std::atomic<const Conditions*> conditions_{nullptr};
};

}  // namespace opgraft
