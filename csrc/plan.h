// Launch plans: what an impl did for a call, which the router replays without Python.
//
// plan_recorder.cpp records a plan while the impl runs in Python: allocations, kernel launches and
// calls of other ops, in order. All that the impl computes from its arguments' metadata is a
// constant in the plan. Pointers and tensors are stored by their origin. A replay takes no lock,
// needs no GIL, and allocates what the impl allocates.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "counter.h"
#include "epochs.h"
#include "python_impl.h"
#include "router.h"

namespace opgraft {

// Note [What a plan relies on]
//
// A plan is replayed for every call with its key: on other tensors, at other addresses, on another
// thread with another state. Its constants were recorded from one call. So a plan must contain
// nothing that may differ between two calls with the same key:
//
// The key holds all of a call except the values in its tensors and the addresses of its memory: see
// PlanKey. For arguments on one storage it holds the distances between their first elements, so
// which of them share memory, and where they overlap, is the same for every call with that key. A
// call whose arguments overlap without sharing a storage has no key. The key also holds the
// thread's state that ops depend on: dispatch keys, grad mode, autocast's dtypes, the default
// dtype.
//
// A pointer is stored by its origin: an offset from an argument's first element, or from memory
// that the plan itself allocates. Because of the key, any of the arguments on one storage may be
// that argument. The pointer must be within the memory that those arguments span
// (`Recorder::is_within`), because another call need not have memory beyond it. An argument's
// storage offset is not in the key.
//
// Values are not in the key, except those of numbers (0-dim tensors on the CPU). An op that reads a
// value is refused unless the plan calls that op again. So are values that Python reads without an
// op, as far as that can be noticed.
//
// An impl can do more than the recorder sees. So before a plan is used, it is compared with what
// Python does on other tensors, with the same key and other addresses, offsets and values
// (plan/trial.py).
//
// The rest is the author's promise: the impl does not branch on a value that is read unnoticed, and
// depends neither on state of its own nor on flags of the process.

// --------------------------------------------------------------------------- keys

// All that an impl can see of a call except the values in its tensors, as 64-bit words. For each
// argument: its type and value. For a tensor: dtype, device, sizes, strides, its address modulo 16,
// requires_grad, whether it is the same tensor as an earlier argument, and its distance from the
// first argument on its storage; for a 0-dim tensor on the CPU also its value. For the thread, the
// state that ops depend on: dispatch keys (autocast, inference mode), grad mode, the default dtype,
// autocast's dtypes. See Note [What a plan relies on].
class PlanKey {
 public:
  // `portable`: the same on each of a machine's devices, to name what is kept on disk. No table
  // holds such a key.
  explicit PlanKey(bool portable = false) noexcept : portable_(portable) {}

  // Returns false if an argument cannot be in a key (a generator), if there are too many, or if two
  // overlap without sharing a storage. `keyset`: the call's, if the impl gets it.
  bool read(c10::ArrayRef<Argument> arguments, c10::DispatchKeySet keyset = {}) noexcept;

  uint64_t hash() const noexcept { return hash_; }
  size_t size() const noexcept { return size_; }
  const uint64_t* words() const noexcept { return words_.data(); }
  bool operator==(const std::vector<uint64_t>& words) const noexcept;
  // Whether the arguments are the same for an impl, whatever the thread's state.
  bool has_same_arguments(const PlanKey& other) const noexcept;

 private:
  static constexpr size_t kWords = 192;

  // Where a tensor's elements are; all null if it is empty.
  struct Location {
    const c10::TensorImpl* tensor = nullptr;
    const c10::StorageImpl* storage = nullptr;
    uintptr_t begin = 0, end = 0;  // of the storage
    uintptr_t first = 0;           // the first element's address
  };

  // Space for `count` words; null if there is not enough, and then there is no key.
  uint64_t* reserve_words(size_t count) noexcept;
  void add_thread(c10::DispatchKeySet keyset) noexcept;
  bool add(const Argument& argument) noexcept;
  bool add(const c10::TensorImpl& tensor) noexcept;
  uint8_t index_of(c10::Device device) const noexcept {
    return C10_UNLIKELY(portable_) ? 0 : static_cast<uint8_t>(device.index());
  }

  bool portable_;
  uint64_t hash_ = 0;
  size_t size_ = 0;
  size_t thread_words_ = 0;  // the number of words for the thread's state
  size_t tensors_ = 0;
  std::array<Location, 32> locations_;
  std::array<uint64_t, kWords> words_;
};

// --------------------------------------------------------------------------- parts of a plan

// A tensor among a call's arguments: an argument, or an item of a list.
struct TensorArgument {
  int32_t index = 0;
  int32_t item = -1;
};

// An address by its origin: null, or an offset from an argument's first element or from the start
// of a memory.
struct Pointer {
  enum class Base : uint8_t { Null, Argument, Memory };
  Base base = Base::Null;
  TensorArgument argument{};
  int32_t memory = -1;
  int64_t offset = 0;  // in bytes
};

// A tensor on the memory of an argument or of the plan.
struct View {
  Pointer pointer{};
  c10::ScalarType dtype{};
  std::vector<int64_t> sizes{};
  std::vector<int64_t> strides{};
  bool contiguous = false;
};

// A value that a plan passes to an op, or returns.
struct Operand {
  enum class Kind : uint8_t { Constant, Argument, Result, View, List };
  Kind kind = Kind::Constant;
  c10::IValue constant{};        // Constant; for a List, an empty list of its type
  TensorArgument argument{};     // Argument
  int32_t memory = -1;           // Result: the tensor that an op returned
  std::unique_ptr<View> view{};  // View
  std::vector<Operand> items{};  // List
};

class Replay;

// Serializes what a plan does. Two plans with the same bytes do the same.
class Fingerprint {
 public:
  void add(const char* bytes, size_t size) { text_.append(bytes, size); }
  void add(uint64_t word) { add(reinterpret_cast<const char*>(&word), sizeof(word)); }
  void add(const std::string& text);
  void add(const std::vector<int64_t>& numbers);
  void add(const Pointer& pointer);
  void add(const View& view);
  void add(const c10::IValue& constant);
  void add(const Operand& operand);
  const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

// One step of a plan.
class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Replay& replay) const = 0;
  virtual void describe(Fingerprint& fingerprint) const = 0;
  // One line for people: "launch _forward_rows_kernel, grid 64, 1, 1".
  virtual std::string text() const = 0;
  // Calls the visitor for each memory that it reads or writes, with whether it needs that as a
  // tensor.
  using Visitor = std::function<void(int32_t memory, bool as_tensor)>;
  virtual void visit(const Visitor& visitor) const = 0;
  virtual bool is_launch() const noexcept { return false; }
  virtual size_t bytes() const noexcept = 0;
  // As JSON can write it: plan_saving.h. Needs the GIL.
  virtual py::object saved() const = 0;
};

void visit(const Operand& operand, const Step::Visitor& visitor);

// Memory that the impl allocates by `torch.empty` and the like.
class Allocation final : public Step {
 public:
  Allocation(int32_t memory, size_t nbytes, c10::Allocator* allocator)
      : memory_(memory), nbytes_(nbytes), allocator_(allocator) {}

  void run(Replay& replay) const override;
  void describe(Fingerprint& fingerprint) const override;
  std::string text() const override;
  void visit(const Visitor& visitor) const override { visitor(memory_, false); }
  size_t bytes() const noexcept override { return sizeof(*this); }
  py::object saved() const override;

  int32_t memory() const noexcept { return memory_; }
  void need_storage() noexcept { as_storage_ = true; }

 private:
  int32_t memory_;
  size_t nbytes_;
  c10::Allocator* allocator_;  // torch's own, which are never destroyed
  bool as_storage_ = false;
};

// Memory that a plan allocates, or that one of its ops returned.
struct Memory {
  c10::DataPtr data{};     // allocated, and not needed as a tensor
  c10::Storage storage{};  // allocated, and needed as one
  at::Tensor result{};     // what an op returned
  char* address = nullptr;
};

// A kernel could not be launched. Nothing was written, so Python may run the impl.
class LaunchError : public c10::Error {
 public:
  using c10::Error::Error;
};

// A plan that is being replayed for a call.
class Replay {
 public:
  Replay(const Argument* arguments, c10::Device device, size_t memories,
         std::optional<uint8_t> poison = std::nullopt)
      : arguments_(arguments), device_(device), poison_(poison) {
    memories_.resize(memories);
  }

  c10::Device device() const noexcept { return device_; }
  // The device's current stream, as the driver's handle; null on the CPU.
  void* stream();
  Memory& memory(int32_t index) { return memories_[static_cast<size_t>(index)]; }
  // The value that each byte of an allocation is set to, so that memory that no kernel writes does
  // not look right.
  const std::optional<uint8_t>& poison() const noexcept { return poison_; }

  char* address(const Pointer& pointer);
  c10::IValue value(const Operand& operand);
  at::Tensor tensor(const View& view);

 private:
  c10::TensorImpl* argument(TensorArgument argument) const {
    const Argument& value = arguments_[argument.index];
    const Argument given =
        argument.item < 0 ? value : value.item(static_cast<size_t>(argument.item));
    return const_cast<c10::TensorImpl*>(given.tensor());
  }

  const Argument* arguments_;
  c10::Device device_;
  std::optional<uint8_t> poison_;
  std::optional<void*> stream_;
  c10::SmallVector<Memory, 6> memories_;
};

// The number of forks between the first process and this one. A plan that was recorded before a
// fork belongs to the parent, because device contexts do not survive a fork.
inline std::atomic<uint32_t> forks{0};

class Plan {
 public:
  // `keep_alive`: a Python object that must live as long as the plan (compiled kernels).
  Plan(c10::Device device, std::vector<std::unique_ptr<Step>> steps, std::vector<Operand> outputs,
       size_t memories, bool watches_hooks, PythonRef keep_alive);

  // Pushes the results on a stack.
  void replay(const Argument* arguments, torch::jit::Stack& results,
              std::optional<uint8_t> poison = std::nullopt) const;

  const std::string& fingerprint() const noexcept { return fingerprint_; }
  std::string text() const;
  size_t launches() const noexcept;
  size_t bytes() const noexcept;
  // Whether it must not be replayed while Triton's launch hooks are set.
  bool watches_hooks() const noexcept { return watches_hooks_; }
  // Whether it was recorded before this process was forked.
  bool is_inherited() const noexcept { return forks_ != forks.load(std::memory_order_relaxed); }

  friend py::dict saved_plan(const Plan& plan);

 private:
  struct Scheduled {
    std::unique_ptr<Step> step;
    std::vector<int32_t> releases;  // the memories that no later step or output needs
  };

  void schedule(std::vector<std::unique_ptr<Step>> steps);

  c10::Device device_;
  std::vector<Scheduled> steps_;
  std::vector<Operand> outputs_;
  size_t memories_;
  bool watches_hooks_;
  uint32_t forks_ = forks.load(std::memory_order_relaxed);
  PythonRef keep_alive_;
  std::string fingerprint_;
};

// --------------------------------------------------------------------------- an override's plans

// A plan in a table, with the key that it is for.
struct PlanEntry {
  uint64_t hash = 0;
  std::vector<uint64_t> key;
  std::shared_ptr<const Plan> plan;
  std::string label;  // the key as text
  // Whether it may serve calls. One that another process made must first agree with native.
  mutable std::atomic<bool> proven{true};
  mutable Counter replays;
  mutable uint64_t replays_before = 0;  // at the last eviction; under the table's lock

  size_t bytes() const noexcept;
};

// Limits of a table. A recording takes milliseconds, so their number is limited: some are free, and
// replays earn more.
struct PlanLimits {
  size_t plans = 256;
  uint64_t free_recordings = 512;
  uint64_t replays_per_recording = 1024;
  // Then it is given up, if nothing was recorded; 0: nothing is.
  uint32_t refusals = 16;
  std::chrono::seconds refill{10};  // least time between two refills of free ones
};

// An override's plans by key. When it is full, the plan that was replayed least since the last
// eviction is evicted. `find`, `action_for` and `note_seen` take no lock and allocate nothing.
// `find` must be called inside an epoch.
class PlanTable {
 public:
  explicit PlanTable(PlanLimits limits);
  ~PlanTable();

  // Whether there are plans, for a check on every call.
  const std::atomic<bool>& has_plans() const noexcept { return has_plans_; }
  // Null if this process has none.
  const PlanEntry* find(const PlanKey& key) const noexcept;

  // What to do about a call whose key has no plan.
  enum class Action : uint8_t {
    Wait,  // run native: the key is new, and may never come again
    Record,
    Refused,  // it cannot be recorded
    Stopped,  // no more recordings for now
  };
  Action action_for(const PlanKey& key) const noexcept;
  // Notes that the key was seen.
  void note_seen(const PlanKey& key) noexcept;

  // Whether native runs calls whose kernels are not compiled yet, while they are compiled.
  bool is_gated() const noexcept { return gated_.load(std::memory_order_relaxed); }
  void gate(bool gated) noexcept { gated_.store(gated, std::memory_order_relaxed); }
  // Whether no impl runs, and only plans are replayed that another process recorded.
  bool only_loaded() const noexcept { return only_loaded_.load(std::memory_order_relaxed); }
  void take_only_loaded(bool only) noexcept { only_loaded_.store(only, std::memory_order_relaxed); }
  // Whether the kernels of a call are compiled.
  bool is_ready(const PlanKey& key) const noexcept;
  void set_ready(const PlanKey& key) noexcept;
  // Whether they have been asked for.
  bool is_asked(const PlanKey& key) const noexcept;
  void set_asked(const PlanKey& key) noexcept;  // counts the calls that needed them
  uint32_t times_asked(const PlanKey& key) const noexcept;
  void forget(const PlanKey& key) noexcept;
  // Resets all requests: the compiler forgot them, or is in another process.
  void forget_asked() noexcept;

  void count_replay(const PlanEntry& entry) noexcept {
    Counter::Shard& shard = Counter::shard();
    entry.replays.add(shard);
    const uint64_t count = replays_.add(shard);
    // Replays earn recordings. Adding up all shards on every call would double its cost.
    if (C10_UNLIKELY(stopped()) && count % update_every_ == 0) update_stopped();
  }

  // Held around a fork, so that the child gets consistent state.
  static void lock() { mutex_.lock(); }
  static void unlock() { mutex_.unlock(); }

  void count_recording() noexcept {
    recordings_.fetch_add(1, std::memory_order_relaxed);
    update_stopped();
  }
  // Returns false if the table was cleared since `generation`.
  bool install(const PlanKey& key, std::shared_ptr<const Plan> plan, std::string label,
               uint64_t generation, bool proven = true);
  // Lets a plan serve calls from now on; returns false if there is none any more.
  bool prove(const PlanKey& key) const noexcept;
  void refuse(const PlanKey& key);
  // Removes a plan that failed, for good.
  void drop(const PlanKey& key);
  // Removes all plans. Recordings in progress are not installed. Free recordings are restored, but
  // not if they were shortly before: an override that is toggled all the time would record all the
  // time.
  void clear();
  uint64_t generation() const noexcept { return generation_.load(std::memory_order_relaxed); }
  uint64_t recordings() const noexcept { return recordings_.load(std::memory_order_relaxed); }
  bool stopped() const noexcept { return stopped_.load(std::memory_order_relaxed); }
  bool given_up() const noexcept { return given_up_.load(std::memory_order_relaxed); }
  // Whether Python runs every call without a plan, even if the author declared that not worthwhile.
  // For tests and verification.
  bool runs_all() const noexcept { return runs_all_.load(std::memory_order_relaxed); }
  void run_all(bool all) noexcept { runs_all_.store(all, std::memory_order_relaxed); }
  std::vector<std::shared_ptr<const PlanEntry>> entries() const;

 private:
  struct Snapshot {
    uint64_t mask = 0;
    std::vector<std::pair<uint64_t, const PlanEntry*>> slots;
  };
  struct KeyHistory;  // the keys that were seen, and that were refused
  // The history as it is; empty before the first key.
  const KeyHistory& history() const noexcept;
  // The history to add to. Null if there is no memory for it: a key that is not remembered is new.
  KeyHistory* writable_history() noexcept;

  // What was removed, to be freed once no reader can hold it. Not freed under the lock, because
  // freeing a plan may run Python.
  struct Garbage {
    std::vector<std::shared_ptr<const PlanEntry>> entries;
    std::unique_ptr<const Snapshot> snapshot;
  };

  // Updates whether recordings are used up.
  void update_stopped() noexcept;

  // Needs the lock. Returns the snapshot that was replaced.
  const Snapshot* publish();
  std::shared_ptr<const PlanEntry> evict();
  static void retire(Garbage garbage);

  PlanLimits limits_;
  std::atomic<const Snapshot*> snapshot_;
  std::atomic<KeyHistory*> history_{nullptr};  // created for the first key, and then it stays
  mutable Counter replays_;
  std::atomic<uint64_t> recordings_{0};
  std::atomic<uint64_t> generation_{0};
  std::atomic<uint32_t> refusals_{0};
  std::atomic<bool> stopped_{false};
  const uint64_t update_every_;
  std::atomic<bool> given_up_;
  std::atomic<bool> runs_all_{false};
  std::atomic<bool> gated_{false};
  std::atomic<bool> only_loaded_{false};
  std::atomic<bool> has_plans_{false};
  std::atomic<bool> ever_installed_{false};  // a plan was installed once
  std::optional<std::chrono::steady_clock::time_point>
      refilled_;  // needs the lock, as do the members below
  // One lock for all tables, which a fork takes. Its holder runs no Python, and waits for nothing.
  static inline std::mutex mutex_;
  std::vector<std::shared_ptr<const PlanEntry>> entries_;
};

}  // namespace opgraft
