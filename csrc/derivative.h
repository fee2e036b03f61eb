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

  // Registers a kernel in front of the one at a backend's autograd key, for good.
  static std::shared_ptr<Derivative> install(const std::string& name, const std::string& overload,
                                             const std::string& dispatch_key);

  explicit Derivative(const c10::OperatorHandle& op);

  void publish(Conditions conditions);

  // hook(keyset, values) returns the call's result, or NotImplemented to use the op's own
  // derivative.
  void set_hook(py::object hook) { hook_ = PythonRef(std::move(hook)); }

  size_t argument_count() const noexcept { return argument_count_; }

  // Whether an override with a derivative may take a call.
  bool may_differentiate(const Argument* arguments) const;

  // Replaces the arguments on the stack by results. Returns false, with the stack unchanged, if the
  // call gets the op's own derivative.
  bool differentiate(c10::DispatchKeySet keyset, torch::jit::Stack& stack) const;

 private:
  PythonConverter converter_;
  std::string display_name_;
  size_t argument_count_;
  PythonRef hook_;
  std::atomic<const Conditions*> conditions_{nullptr};
};

}  // namespace opgraft
