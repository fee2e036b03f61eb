// Our kernel at an op's autograd key, for overrides with a derivative of their own.
//
// Calls that no such override may take go on at once, without the GIL; the rest is Python's.
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
  // The conditions of the overrides that have a derivative; none where Python has to be asked.
  using Conditions = std::vector<std::optional<Condition>>;

  // Puts itself in front of what is at the autograd key of a backend, for good.
  static std::shared_ptr<Derivative> install(const std::string& name, const std::string& overload,
                                             const std::string& dispatch_key);

  Derivative(c10::OperatorHandle op, c10::DispatchKey key);

  void publish(Conditions conditions);

  // hook(keyset, values) -> the call's result, or NotImplemented where the op's own derivative
  // holds.
  void set_hook(py::object hook) { hook_ = PythonRef(std::move(hook)); }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keyset,
                  torch::jit::Stack* stack);

 private:
  bool may_own(const c10::IValue* arguments) const;
  bool own(c10::DispatchKeySet keyset, torch::jit::Stack& stack) const;

  NativeKernel native_;
  Signature signature_;
  std::string who_;
  size_t arguments_;
  bool composite_;  // the op's router is what comes next: it stands at the autograd key too
  PythonRef hook_;
  std::atomic<const Conditions*> conditions_{nullptr};
};

}  // namespace opgraft
