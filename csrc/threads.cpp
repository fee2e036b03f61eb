#include "threads.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/SafePyObject.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <utility>

#include "counter.h"
#include "epochs.h"
#include "router.h"
#include "thread_states.h"
#include "torch_private.h"

namespace opgraft {

namespace {

// The key of a thread's scopes in torch's state. Never destroyed, because threads may outlive
// static destructors.
const std::string& kScopes = *new std::string("opgraft.scopes");

bool field_matches(const std::optional<std::string>& wanted,
                   const std::optional<std::string>& given) {
  return !wanted || (given ? *wanted == *given : wanted->empty());
}

}  // namespace

Frame::Frame(const Router* router) noexcept : router_(router), outer_(innermost_) {
  innermost_ = this;
}

Frame::Frame(std::string op) : op_(std::move(op)), outer_(innermost_) { innermost_ = this; }

Frame::~Frame() { innermost_ = outer_; }

bool Frame::any_bypasses(const Router* router, const std::string& op) noexcept {
  for (const Frame* frame = innermost_; frame != nullptr; frame = frame->outer_) {
    if (frame->router_ == router || (frame->router_ == nullptr && frame->op_ == op)) return true;
  }
  return false;
}

void Frame::note_native(const Router* router, const torch::jit::Stack& stack, size_t outputs) {
  for (Frame* frame = innermost_; frame != nullptr; frame = frame->outer_) {
    if (frame->router_ != router) continue;
    auto& result = frame->native_results_.emplace_back();
    for (size_t i = stack.size() - outputs; i < stack.size(); ++i) {
      if (stack[i].isTensor()) result.emplace_back(stack[i].toTensor().getIntrusivePtr());
    }
    return;
  }
}

bool Frame::ended_in_native(const torch::jit::Stack& stack, size_t outputs) const {
  for (const auto& result : native_results_) {
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
  return field_matches(dsl, other.dsl) && field_matches(op, other.op) &&
         field_matches(pack, other.pack) && field_matches(dispatch_key, other.dispatch_key) &&
         field_matches(name, other.name);
}

// A scope in all lists that contain it.
struct Scope::Entry {
  const std::optional<Selector> off;
  std::shared_ptr<const void> tag;  // until it is closed; needs the GIL
  std::atomic<bool> open{true};

  Entry(std::optional<Selector> selector, std::shared_ptr<const void> name)
      : off(std::move(selector)), tag(std::move(name)) {}
};

// The scopes that a thread is in, outermost first. For torch it is a SafePyObject, but without a
// Python object, so destroying it needs no GIL.
struct Scope::ScopeList final : c10::SafePyObject {
  ScopeList() : c10::SafePyObject(/*data=*/nullptr, /*pyinterpreter=*/nullptr) {}

  template <class Predicate>
  bool any(Predicate&& predicate) const {
    for (const auto& entry : entries) {
      if (entry->open.load(std::memory_order_relaxed) && predicate(*entry)) return true;
    }
    return false;
  }

  std::vector<std::shared_ptr<Entry>> entries;
};

Scope::Scope(std::optional<Selector> off, std::shared_ptr<const void> tag)
    : off_(std::move(off)), tag_(std::move(tag)) {}

// Closes a scope that was not left. This may run on any thread. The closed entry in the list of the
// thread that entered it has no effect.
Scope::~Scope() { close(); }

void Scope::enter() {
  TORCH_CHECK(!entry_, "this scope was entered already");
  auto entry = std::make_shared<Entry>(off_, tag_);
  auto fresh = std::make_shared<ScopeList>();
  if (const ScopeList* outer = current_list()) {
    for (const auto& each : outer->entries) {
      if (each->open.load(std::memory_order_relaxed)) fresh->entries.push_back(each);
    }
  }
  fresh->entries.push_back(entry);
  at::impl::ThreadLocalPythonObjects::set(kScopes, std::move(fresh));
  open_.fetch_add(1, std::memory_order_relaxed);
  entry_ = std::move(entry);
}

void Scope::exit() {
  close();
  forget_closed();
}

void Scope::close() noexcept {
  if (entry_ == nullptr) return;
  entry_->open.store(false, std::memory_order_relaxed);
  entry_->tag.reset();
  entry_.reset();
  open_.fetch_sub(1, std::memory_order_relaxed);
}

void Scope::forget_closed() {
  const ScopeList* before = current_list();
  if (before == nullptr) return;
  auto fresh = std::make_shared<ScopeList>();
  for (const auto& each : before->entries) {
    if (each->open.load(std::memory_order_relaxed)) fresh->entries.push_back(each);
  }
  if (fresh->entries.empty()) {
    erase_python_object(kScopes);
  } else {
    at::impl::ThreadLocalPythonObjects::set(kScopes, std::move(fresh));
  }
}

bool Scope::any_on_this_thread() noexcept { return current_list() != nullptr; }

const Scope::ScopeList* Scope::current_list() noexcept {
  using Objects = at::impl::ThreadLocalPythonObjects;
  return Objects::contains(kScopes) ? static_cast<const ScopeList*>(Objects::get(kScopes).get())
                                    : nullptr;
}

bool Scope::is_off(const Selector& override) {
  if (C10_LIKELY(open_.load(std::memory_order_relaxed) == 0)) return false;
  const ScopeList* scopes = current_list();
  return scopes != nullptr && scopes->any([&](const Entry& entry) {
    return entry.off.has_value() && entry.off->matches(override);
  });
}

bool Scope::is_observed() noexcept {
  const ScopeList* scopes = current_list();
  return scopes != nullptr &&
         scopes->any([](const Entry& entry) { return !entry.off.has_value(); });
}

std::vector<std::shared_ptr<const void>> Scope::tags(bool observing) {
  std::vector<std::shared_ptr<const void>> found;
  if (const ScopeList* scopes = current_list()) {
    scopes->any([&](const Entry& entry) {
      if (entry.off.has_value() != observing) found.push_back(entry.tag);
      return false;
    });
  }
  return found;
}

void install_fork_handlers() {
  static const int once = pthread_atfork(
      [] {
        Epochs::instance().lock();
        Counter::lock();
      },
      [] {
        Counter::unlock();
        Epochs::instance().unlock();
      },
      [] {
        Counter::forget_other_threads();
        Counter::unlock();
        Epochs::instance().forget_other_threads();
        Epochs::instance().unlock();
        Router::forget_other_threads();
        ThreadStates::forget();
      });
  TORCH_CHECK(once == 0, "pthread_atfork failed: ", once);
}

}  // namespace opgraft
