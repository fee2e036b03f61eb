// Impls in Python, and the conversion of arguments and results.
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

// Converts an op's arguments to Python objects, and its results back. One per router.
class PythonConverter {
 public:
  explicit PythonConverter(const c10::FunctionSchema& schema);

  size_t positional() const noexcept { return positional_; }
  // The largest absolute value up to which an integer for an argument is part of a call's kind; -1:
  // no integer is.
  int64_t max_choice(size_t argument) const noexcept { return max_choices_[argument]; }
  // Converts an argument's value. Needs the GIL.
  py::object to_python(size_t argument, const c10::IValue& value) const;
  // Converts all arguments, in the schema's order.
  py::tuple to_python(const c10::IValue* arguments) const;
  // Converts what an impl returned to the op's results. Throws py::type_error if that is
  // impossible.
  std::vector<c10::IValue> to_results(py::handle result, const std::string& who) const;
  // Pops the results off the stack, and converts them.
  py::object pop_results(torch::jit::Stack& stack) const;
  // Pushes all of an op's arguments, in the schema's order.
  void push_arguments(const py::tuple& values, torch::jit::Stack& stack) const;
  py::handle keyword_names() const noexcept { return keyword_names_.get(); }

 private:
  enum class Kind : uint8_t { Tensor, TensorList, ScalarType, Layout, MemoryFormat, Other };

  c10::FunctionSchema schema_;  // a copy: the op's own is freed with its library
  std::vector<Kind> kinds_;
  std::vector<int64_t> max_choices_;
  size_t positional_ = 0;
  PythonRef keyword_names_;  // of the keyword-only arguments; null if there are none
};

// A set of 64-bit keys with counts, without a lock. It is bounded, and forgets keys when full.
template <size_t Size>
class KeyTable {
 public:
  // How often `add` was called with the key, unless the table has forgotten it.
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
    // Full: the key replaces the first entry. The work for a forgotten key is only done once more.
    Entry& entry = entries_[key / 2 % Size];
    entry.count.store(1, std::memory_order_relaxed);
    entry.key.store(key, std::memory_order_relaxed);
  }

  // Sets the key's count to zero.
  void forget(uint64_t key) noexcept {
    if (const Entry* entry = find(key)) {
      const_cast<Entry*>(entry)->count.store(0, std::memory_order_relaxed);
    }
  }

  // Sets all counts to zero. The keys stay, because other threads may be searching.
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
      if (found == 0) return nullptr;  // entries are never vacated, so the key would be here
    }
    return nullptr;
  }

  std::array<Entry, Size> entries_;
};

// The Python functions that an impl calls. Rare work is done in Python, where it is simpler.
struct PythonHooks {
  // takes(override, values) -> bool: conditions in Python, quarantine; None: native runs the call
  PythonRef takes;
  PythonRef first_hit;  // first_hit(override, keyset, values) -> result: a hit that is checked
  PythonRef recover;    // recover(override, keyset, values, error) -> result, or raises
  PythonRef
      is_capturing;  // is_capturing() -> bool: a CUDA graph is being captured on the current stream
  PythonRef warn_captured;   // warn_captured(override): a capture has the native kernel for good
  PythonRef contract_error;  // the type of the error for results that the op cannot have
};

class PythonImpl final : public Impl {
 public:
  PythonImpl(py::object override, py::object function, bool takes_keyset, bool falls_back,
             uint32_t checked_hits, std::shared_ptr<const PythonConverter> converter,
             std::shared_ptr<const PythonHooks> hooks, std::string display_name);

  bool run(const Override& override, Call& call, c10::Device device) override;
  bool takes(const Override& override, Call& call) override;
  bool quarantine(const Call& call) override;
  bool is_quarantined(const Call& call) override;
  bool has_quarantined() override { return any_quarantined_.load(std::memory_order_acquire); }

 private:
  std::vector<c10::IValue> call_first_hit(const Call& call) const;
  std::vector<c10::IValue> call_function(const Override& override, const Call& call, bool capturing,
                                         bool is_differentiated) const;
  // Raises if no result can be differentiated, and one could before.
  void check_differentiated(const Override& override, c10::ArrayRef<c10::IValue> results) const;
  std::vector<c10::IValue> recover(const Call& call, const py::error_already_set& error) const;
  py::object vectorcall(const Call& call) const;
  std::vector<c10::IValue> results(py::handle result) const;

  PythonRef override_;
  PythonRef function_;
  bool takes_keyset_;
  bool falls_back_;
  uint32_t checked_hits_;
  std::shared_ptr<const PythonConverter> converter_;
  std::shared_ptr<const PythonHooks> hooks_;
  std::string display_name_;
  std::atomic<bool> any_quarantined_{false};
  KeyTable<256> quarantined_kinds_;  // the kinds of calls that it failed for
  KeyTable<256> checked_kinds_;      // checks against native by kind of call
  KeyTable<4096> ran_calls_;  // exact keys that ran on an accelerator: their kernels are compiled
};

// Stands in a chain for deferred overrides, which the first call registers.
class Placeholder final : public Impl {
 public:
  explicit Placeholder(py::object register_overrides)
      : register_overrides_(std::move(register_overrides)) {}

  bool run(const Override&, Call&, c10::Device) override { return false; }
  // Calls Python to register them. Returns whether they are in the chain now. This may be on any
  // thread, so what Python does must not depend on the thread.
  bool takes(const Override& override, Call& call) override;

 private:
  PythonRef register_overrides_;
};

}  // namespace opgraft
