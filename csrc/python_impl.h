// An impl in Python: how a call's arguments become Python's, and its results come back.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python.h"
#include "router.h"

namespace opgraft {

// How an op's arguments become Python objects and its results come back. One per router.
class Signature {
 public:
  explicit Signature(const c10::FunctionSchema& schema);

  size_t positional() const noexcept { return positional_; }
  // Up to which absolute value an integer given for an argument is part of a call's kind; -1: none
  // is.
  int64_t choice(size_t argument) const noexcept { return choices_[argument]; }
  // An argument's value as Python has it. Needs the GIL.
  py::object to_python(size_t argument, const c10::IValue& value) const;
  // All arguments, in the schema's order.
  py::tuple to_python(const c10::IValue* arguments) const;
  // What an impl returned as the op's results. Throws py::type_error where it cannot be that.
  std::vector<c10::IValue> to_results(py::handle result, const std::string& who) const;
  // The results on the stack, taken off it, as Python has them.
  py::object pop_results(torch::jit::Stack& stack) const;
  // Pushes an op's arguments, all of them in the schema's order.
  void push_arguments(const py::tuple& values, torch::jit::Stack& stack) const;
  py::handle keyword_names() const noexcept { return names_.get(); }

 private:
  enum class Kind : uint8_t { Tensor, TensorList, ScalarType, Layout, MemoryFormat, Other };

  c10::FunctionSchema schema_;  // by value: the op's own goes when its library does
  std::vector<Kind> kinds_;
  std::vector<int64_t> choices_;
  size_t positional_ = 0;
  PythonRef names_;  // of the keyword-only arguments; null if there are none
};

// A set of 64-bit keys, read and added to without a lock; bounded, and then it forgets.
template <size_t Size>
class KeyTable {
 public:
  // How often `add` was called with the key, as far as the table remembers.
  uint32_t count(uint64_t key) const noexcept {
    const auto* entry = find(key);
    return entry == nullptr ? 0 : entry->count.load(std::memory_order_relaxed);
  }

  void add(uint64_t key) noexcept {
    key |= 1;
    for (size_t probe = 0; probe < kProbes; ++probe) {
      Entry& entry = entries_[(key / 2 + probe) % Size];
      uint64_t found = entry.key.load(std::memory_order_relaxed);
      if (found == 0 && entry.key.compare_exchange_strong(found, key, std::memory_order_relaxed)) {
        found = key;
      }
      if (found == key) {
        entry.count.fetch_add(1, std::memory_order_relaxed);
        return;
      }
    }
    // Full: the key takes the first place over. What is forgotten is only done once more.
    Entry& entry = entries_[key / 2 % Size];
    entry.count.store(1, std::memory_order_relaxed);
    entry.key.store(key, std::memory_order_relaxed);
  }

  // The key's count is zero again.
  void forget(uint64_t key) noexcept {
    if (const Entry* entry = find(key)) {
      const_cast<Entry*>(entry)->count.store(0, std::memory_order_relaxed);
    }
  }

  // Every count is zero again. The keys keep their places, as others may be looking for theirs.
  void clear() noexcept {
    for (Entry& entry : entries_) entry.count.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kProbes = 8;
  struct Entry {
    std::atomic<uint64_t> key{0};
    std::atomic<uint32_t> count{0};
  };

  const Entry* find(uint64_t key) const noexcept {
    key |= 1;
    for (size_t probe = 0; probe < kProbes; ++probe) {
      const Entry& entry = entries_[(key / 2 + probe) % Size];
      const uint64_t found = entry.key.load(std::memory_order_relaxed);
      if (found == key) return &entry;
      if (found == 0) return nullptr;  // a place is never vacated: it would have been taken
    }
    return nullptr;
  }

  std::array<Entry, Size> entries_;
};

// The parts of Python that an impl falls back on: what is rare stays in Python, where it is plain.
struct PythonHooks {
  PythonRef takes;      // takes(override, values) -> bool: conditions in Python, quarantine
  PythonRef first;      // first(override, keyset, values) -> result: a hit that is checked
  PythonRef recover;    // recover(override, keyset, values, error) -> result, or raises
  PythonRef capturing;  // capturing() -> bool: a CUDA graph is being captured on the current stream
  PythonRef error;      // the type of the error for results that the op cannot have
};

class PythonImpl final : public Impl {
 public:
  PythonImpl(py::object override, py::object function, bool takes_keyset, bool falls_back,
             uint32_t checked_hits, std::shared_ptr<const Signature> signature,
             std::shared_ptr<const PythonHooks> hooks, std::string who);

  bool run(const Override& override, Call& call, c10::Device device) override;
  bool wants(const Override& override, Call& call) override;
  bool quarantine(const Call& call) override;
  bool is_quarantined(const Call& call) override;
  bool has_quarantined() override { return failed_.load(std::memory_order_acquire); }

 private:
  std::vector<c10::IValue> call_first(const Call& call) const;
  std::vector<c10::IValue> call_function(const Call& call, bool capturing) const;
  std::vector<c10::IValue> recover(const Call& call, const py::error_already_set& error) const;
  py::object vectorcall(const Call& call) const;
  std::vector<c10::IValue> results(py::handle result) const;

  PythonRef override_;
  PythonRef function_;
  bool takes_keyset_;
  bool falls_back_;
  uint32_t checked_hits_;
  std::shared_ptr<const Signature> signature_;
  std::shared_ptr<const PythonHooks> hooks_;
  std::string who_;
  std::atomic<bool> failed_{false};
  KeyTable<256> failed_kinds_;  // kinds of calls that it failed for
  KeyTable<256> checked_;       // kinds of calls whose outputs were compared with native's
  KeyTable<4096> ran_;  // exact calls on an accelerator: nothing is compiled for them any more
};

// Stands for overrides that are registered once a call comes by.
class Placeholder final : public Impl {
 public:
  explicit Placeholder(py::object arrived) : arrived_(std::move(arrived)) {}

  bool run(const Override&, Call&, c10::Device) override { return false; }
  // Whether they are in the chain now: asks Python, which registers them. On any thread, so what
  // Python does there must not depend on it.
  bool wants(const Override& override, Call& call) override;

 private:
  PythonRef arrived_;
};

}  // namespace opgraft
