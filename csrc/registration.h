// Our kernels at the dispatcher, and what makes them obsolete.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>

namespace opgraft {

// Where our kernels are registered, according to torch's messages.
extern const char* const kOrigin;

// A kernel of ours at an op and dispatch key.
//
// Its owner lives until the process ends: the dispatcher may be destroyed before our statics.
class Registration {
 public:
  Registration(const c10::OperatorHandle& op, c10::DispatchKey key, c10::KernelFunction kernel,
               std::optional<c10::impl::CppSignature> signature = std::nullopt);

  // Calls that are in the kernel go on. The op keeps its entry in the dispatcher, to which handles
  // of it point that others have, compiled graphs among them.
  void remove();

 private:
  c10::OperatorName name_;
  c10::KernelFunction kernel_;
  std::optional<c10::RegistrationHandleRAII> handle_;
};

// Calls `tell` once, when an op of this name is defined the next time.
//
// A library may destroy its op and define it again, as a notebook's cell does that runs a second
// time. Our kernel at the op outlives that, and has copies of the old op's kernels. `tell` is called
// under the dispatcher's lock: it must neither use the dispatcher nor wait for the GIL.
void on_redefinition(const c10::OperatorName& name, std::function<void()> tell);

}  // namespace opgraft
