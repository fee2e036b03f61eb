#include "threads.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pthread.h>
#include <torch/version.h>

#include <string_view>
#include <utility>

#include "counter.h"
#include "epochs.h"
#include "router.h"

namespace opgraft {

namespace {

// torch copies its thread-local debug information to the autograd engine's threads. From 2.13 on anyone
// can have a kind of their own; before, one that only torch's own tests use has to do.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
constexpr std::string_view kScopeName = "opgraft.disabled";
constexpr c10::DebugInfoKind kScope(&kScopeName);
#else
constexpr c10::DebugInfoKind kScope = c10::DebugInfoKind::TEST_INFO_2;
#endif

bool agrees(const std::optional<std::string>& wanted, const std::optional<std::string>& given) {
  return !wanted || wanted == given;
}

}  // namespace

Frame::Frame(const Router* router) noexcept : router_(router), outer_(innermost_) {
  innermost_ = this;
}

Frame::Frame(std::string op) : op_(std::move(op)), outer_(innermost_) {
  innermost_ = this;
}

Frame::~Frame() {
  innermost_ = outer_;
}

bool Frame::any_bypasses(const Router* router, const std::string& op) noexcept {
  for (const Frame* frame = innermost_; frame != nullptr; frame = frame->outer_) {
    if (frame->router_ == router || (frame->router_ == nullptr && frame->op_ == op)) return true;
  }
  return false;
}

void Frame::note_native(const Router* router, const torch::jit::Stack& stack, size_t outputs) {
  for (Frame* frame = innermost_; frame != nullptr; frame = frame->outer_) {
    if (frame->router_ != router) continue;
    auto& result = frame->native_.emplace_back();
    for (size_t i = stack.size() - outputs; i < stack.size(); ++i) {
      if (stack[i].isTensor()) result.emplace_back(stack[i].toTensor().getIntrusivePtr());
    }
    return;
  }
}

bool Frame::ended_in_native(const torch::jit::Stack& stack, size_t outputs) const {
  for (const auto& result : native_) {
    size_t next = 0;
    bool same = true;
    for (size_t i = stack.size() - outputs; same && i < stack.size(); ++i) {
      if (!stack[i].isTensor()) continue;
      same = next < result.size() &&
             result[next]._unsafe_get_target() == stack[i].unsafeToTensorImpl();
      ++next;
    }
    if (same && next == result.size() && next > 0) return true;
  }
  return false;
}

bool Selector::matches(const Selector& other) const {
  return agrees(dsl, other.dsl) && agrees(op, other.op) && agrees(pack, other.pack) &&
         agrees(dispatch_key, other.dispatch_key) && agrees(name, other.name);
}

// The scopes that a thread is in, as it hands them on.
struct Scope::Active final : c10::DebugInfoBase {
  Active() { alive_.fetch_add(1, std::memory_order_relaxed); }
  ~Active() override { alive_.fetch_sub(1, std::memory_order_relaxed); }
  Active(const Active&) = delete;
  Active& operator=(const Active&) = delete;

  std::vector<Selector> selectors;
  bool observed = false;
};

struct Scope::State {
  std::optional<Selector> selector;
  std::optional<c10::DebugInfoGuard> guard;
};

Scope::Scope(std::optional<Selector> selector) : state_(std::make_unique<State>()) {
  state_->selector = std::move(selector);
}

Scope::~Scope() = default;

void Scope::enter() {
  TORCH_CHECK(!state_->guard, "this scope was entered already");
  auto scopes = std::make_shared<Active>();
  if (const Active* outer = current()) {
    scopes->selectors = outer->selectors;
    scopes->observed = outer->observed;
  }
  if (state_->selector) {
    scopes->selectors.push_back(*state_->selector);
  } else {
    scopes->observed = true;
  }
  state_->guard.emplace(kScope, std::move(scopes));
}

void Scope::exit() {
  state_->guard.reset();
}

bool Scope::any_here() noexcept {
  return c10::ThreadLocalDebugInfo::get(kScope) != nullptr;
}

const Scope::Active* Scope::current() noexcept {
  return dynamic_cast<const Active*>(c10::ThreadLocalDebugInfo::get(kScope));
}

bool Scope::is_off(const Selector& override) {
  if (C10_LIKELY(alive_.load(std::memory_order_relaxed) == 0)) return false;
  const Active* scopes = current();
  if (scopes == nullptr) return false;
  for (const Selector& selector : scopes->selectors) {
    if (selector.matches(override)) return true;
  }
  return false;
}

bool Scope::is_observed() noexcept {
  const Active* scopes = current();
  return scopes != nullptr && scopes->observed;
}

void mind_forks() {
  static const int once = pthread_atfork(
      [] { Epochs::instance().lock(); }, [] { Epochs::instance().unlock(); },
      [] {
        Epochs::instance().forget_other_threads();
        Epochs::instance().unlock();
        Counter::forget_other_threads();
        Router::forget_other_threads();
      });
  TORCH_CHECK(once == 0, "pthread_atfork failed: ", once);
}

}  // namespace opgraft
