#include "registration.h"

#include <c10/util/Exception.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
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

// No call has this key.
constexpr auto kUnusedKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Keeps an op's entry in the dispatcher, for good. Once for each name.
void keep_entry(const c10::OperatorName& name) {
  static auto& kept = *new std::unordered_set<c10::OperatorName>();
  static auto& mutex = *new std::mutex();
  const std::lock_guard<std::mutex> lock(mutex);
  if (!kept.insert(name).second) return;
  new c10::RegistrationHandleRAII(
      registered(name, kUnusedKey, c10::KernelFunction::makeFallthrough(), std::nullopt));
}

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
      return made;
    }();
    return *listener;
  }

  void add(const c10::OperatorName& name, std::function<void()> tell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_[name].push_back(std::move(tell));
  }

  void onOperatorRegistered(const c10::OperatorHandle& op) override {
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

  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::vector<std::function<void()>>> waiting_;
};

}  // namespace

Registration::Registration(const c10::OperatorHandle& op, c10::DispatchKey key,
                           c10::KernelFunction kernel,
                           std::optional<c10::impl::CppSignature> signature)
    : name_(op.operator_name()),
      kernel_(kernel),
      handle_(registered(name_, key, std::move(kernel), std::move(signature))) {}

void Registration::remove() {
  keep_entry(name_);
  handle_.reset();
}

void on_redefinition(const c10::OperatorName& name, std::function<void()> tell) {
  Listener::instance().add(name, std::move(tell));
}

}  // namespace opgraft
