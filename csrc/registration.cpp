#include "registration.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace opgraft {

const char* const kOrigin = "opgraft router";

namespace {

// torch warns once per process when a kernel replaces another. `WarnAlways` keeps that one warning
// for others, and this thread's handler drops ours.
class WithoutOurWarning {
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Quiet quiet_;
  c10::WarningUtils::WarningHandlerGuard handler_{&quiet_};
  c10::WarningUtils::WarnAlways always_{true};
};

c10::RegistrationHandleRAII registered(const c10::OperatorName& name, c10::DispatchKey key,
                                       c10::KernelFunction kernel,
                                       std::optional<c10::impl::CppSignature> signature) {
  const WithoutOurWarning quiet;
  return c10::Dispatcher::singleton().registerImpl(name, key, std::move(kernel),
                                                   std::move(signature),
                                                   /*inferred_function_schema=*/nullptr, kOrigin);
}

// Not at the process's end, when torch destroys all ops.
std::atomic<bool> tells{true};

class Listener final : public c10::OpRegistrationListener {
 public:
  // Never destroyed, like its registration.
  static Listener& instance() {
    static auto* const listener = [] {
      auto owned = std::make_unique<Listener>();
      auto* made = owned.get();
      // Tells of every op that is there, of which nobody has asked yet.
      new c10::RegistrationHandleRAII(
          c10::Dispatcher::singleton().addRegistrationListener(std::move(owned)));
      // Runs before the destructors of whatever exists by now.
      std::atexit([] { tells.store(false); });
      return made;
    }();
    return *listener;
  }

  void add(const c10::OperatorName& name, std::function<void()> tell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_[name].push_back(std::move(tell));
  }

  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    if (!tells.load()) return;
    std::vector<std::function<void()>> told;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = waiting_.find(op.operator_name());
      if (found == waiting_.end()) return;
      told = std::move(found->second);
      waiting_.erase(found);
    }
    for (const auto& tell : told) tell();
  }

  void onOperatorRegistered(const c10::OperatorHandle&) override {}

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::vector<std::function<void()>>> waiting_;
};

}  // namespace

Registration::Registration(const c10::OperatorHandle& op, c10::DispatchKey key,
                           c10::KernelFunction kernel,
                           std::optional<c10::impl::CppSignature> signature)
    : kernel_(kernel),
      handle_(registered(op.operator_name(), key, std::move(kernel), std::move(signature))) {}

void when_destroyed(const c10::OperatorName& name, std::function<void()> tell) {
  Listener::instance().add(name, std::move(tell));
}

NamedOp::NamedOp(const c10::OperatorHandle& op) : name_(op.operator_name()), schema_(op.schema()) {
  keep(op);
}

const c10::OperatorHandle& NamedOp::look_up() const {
  const auto found = c10::Dispatcher::singleton().findSchema(name_);
  TORCH_CHECK(found.has_value(), "a compiled graph calls ", name_, ", which was destroyed");
  TORCH_CHECK(found->schema() == schema_, "a compiled graph calls ", name_,
              ", which was defined anew with another schema: compile the graph again");
  return keep(*found);
}

const c10::OperatorHandle& NamedOp::keep(const c10::OperatorHandle& op) const {
  const auto* kept = new c10::OperatorHandle(op);
  state_->op.store(kept, std::memory_order_release);
  when_destroyed(name_, [state = state_] { state->op.store(nullptr, std::memory_order_release); });
  return *kept;
}

}  // namespace opgraft
