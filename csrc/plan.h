// Launch plans: what an impl did for one kind of call, as the router replays it with no Python.
//
// A plan is made by recorder.cpp while the impl runs in Python: allocations, kernel launches and
// calls of other ops, in order. All that an impl computes from its arguments' metadata is a
// constant in it; pointers and tensors are known by where they come from. Replaying takes no lock
// and no GIL and allocates what the impl would have.
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
// A plan is replayed for every call that has its key: on other tensors, at other addresses, on
// another thread, under another state of it. All that it has as a constant was true of one call. So
// whatever may differ between two calls with one key must not be in a plan:
//
// The key holds what a call is, but for the values in its tensors and where its memory lies: see
// PlanKey. Arguments on one storage are in it by how far their first elements are apart: which of
// them share memory, and where they overlap, is the same for every call with that key. Arguments
// that overlap without sharing a storage have no key. What ops obey beside their arguments is in it
// as far as it is the thread's: dispatch keys, grad mode, autocast's dtypes, the default dtype.
//
// A pointer comes from where the recorder saw it come from: it lies so many bytes behind an
// argument's first element, or in memory that the plan itself allocates. By the key it is all the
// same which of the arguments on one storage that is. It lies within the memory that they span
// (`Recorder::is_within`): beyond that is memory that another call need not have. The offset of an
// argument in its storage is not in the key.
//
// Values are not in the key, but for numbers (0-dim tensors on the CPU). An op that reads one is
// refused unless the plan calls that op again; so is what Python reads behind the ops' back, as far
// as it can be seen.
//
// And because an impl can do more than any of this can see, a plan is compared with what Python
// does on other tensors before it is used: same key; other addresses, offsets and values
// (plan/trial.py).
//
// What is left is the author's word: no branch on a value that is read unseen, no state of the
// impl's own, no flags of the process.

// --------------------------------------------------------------------------- keys

// Everything that an impl can see of a call but the values in its tensors, as numbers: for each
// argument what it is; for a tensor its dtype, device, sizes, strides, the alignment of its address
// (modulo 16), whether it requires grad, whether it is an earlier argument over again, and where it
// lies relative to the first argument on its storage; for a 0-dim tensor on the CPU also its value;
// and the thread's state that other ops obey: dispatch keys (autocast, inference mode), grad mode,
// the default dtype, autocast's dtypes. See Note [What a plan relies on].
class PlanKey {
 public:
  // False where an argument has no number (a generator), there are too many, or two overlap that
  // share no storage. `keyset`: where the impl gets it.
  bool read(c10::ArrayRef<Argument> arguments, c10::DispatchKeySet keyset = {}) noexcept;

  uint64_t hash() const noexcept { return hash_; }
  size_t size() const noexcept { return size_; }
  const uint64_t* words() const noexcept { return words_.data(); }
  bool operator==(const std::vector<uint64_t>& words) const noexcept;
  // Whether the arguments are the same to an impl, whatever the state of the thread was.
  bool has_same_arguments(const PlanKey& other) const noexcept;

 private:
  static constexpr size_t kWords = 192;

  // Where a tensor's elements are; all null where there are none.
  struct Place {
    const c10::TensorImpl* tensor = nullptr;
    const c10::StorageImpl* storage = nullptr;
    uintptr_t begin = 0, end = 0;  // of the storage
    uintptr_t first = 0;           // the first element's address
  };

  // Room for `count` words, or null where there is none: then the key is of no use.
  uint64_t* room(size_t count) noexcept;
  void add_thread(c10::DispatchKeySet keyset) noexcept;
  bool add(const Argument& argument) noexcept;
  bool add(const c10::TensorImpl& tensor) noexcept;

  uint64_t hash_ = 0;
  size_t size_ = 0;
  size_t thread_size_ = 0;  // so many words are about the thread
  size_t tensors_ = 0;
  std::array<Place, 32> seen_;
  std::array<uint64_t, kWords> words_;
};

// --------------------------------------------------------------------------- what a plan is made
// of

// A tensor among a call's arguments: an argument, or an item of a list.
struct Leaf {
  int32_t argument = 0;
  int32_t item = -1;
};

// Where an address comes from: a constant (null), an argument's first element, or a memory's start.
struct Pointer {
  enum class Base : uint8_t { Null, Argument, Memory };
  Base base = Base::Null;
  Leaf leaf{};
  int32_t memory = -1;
  int64_t offset = 0;  // in bytes
};

// A tensor on memory that an argument or the plan has.
struct View {
  Pointer pointer{};
  c10::ScalarType dtype{};
  std::vector<int64_t> sizes{};
  std::vector<int64_t> strides{};
  bool contiguous = false;
};

// A value that a plan hands to an op, or returns.
struct Operand {
  enum class Kind : uint8_t { Constant, Argument, Result, View, List };
  Kind kind = Kind::Constant;
  c10::IValue constant{};        // Constant; for a List, an empty list of its type
  Leaf leaf{};                   // Argument
  int32_t memory = -1;           // Result: the tensor that an op returned
  std::unique_ptr<View> view{};  // View
  std::vector<Operand> items{};  // List
};

class Replay;

// Collects what a plan does as bytes: two plans with the same bytes do the same.
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

// One thing that a plan does.
class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Replay& replay) const = 0;
  virtual void describe(Fingerprint& fingerprint) const = 0;
  // One line for people: "launch _forward_rows_kernel, grid 64, 1, 1".
  virtual std::string text() const = 0;
  // Names each memory that it reads or writes, and whether it needs that as a tensor.
  using Visitor = std::function<void(int32_t memory, bool as_tensor)>;
  virtual void visit(const Visitor& visitor) const = 0;
  virtual bool is_launch() const noexcept { return false; }
  virtual size_t bytes() const noexcept = 0;
};

void visit(const Operand& operand, const Step::Visitor& visitor);

// Memory that the impl allocates by `torch.empty` and its like.
class Allocation final : public Step {
 public:
  Allocation(int32_t memory, size_t nbytes, c10::Allocator* allocator)
      : memory_(memory), nbytes_(nbytes), allocator_(allocator) {}

  void run(Replay& replay) const override;
  void describe(Fingerprint& fingerprint) const override;
  std::string text() const override;
  void visit(const Visitor& visitor) const override { visitor(memory_, false); }
  size_t bytes() const noexcept override { return sizeof(*this); }

  int32_t memory() const noexcept { return memory_; }
  void need_storage() noexcept { as_storage_ = true; }

 private:
  int32_t memory_;
  size_t nbytes_;
  c10::Allocator* allocator_;  // torch's own, which live for ever
  bool as_storage_ = false;
};

// Memory that a plan allocates, or that an op of it returned.
struct Memory {
  c10::DataPtr data{};     // allocated, and never seen as a tensor
  c10::Storage storage{};  // allocated, and needed as one
  at::Tensor result{};     // what an op returned
  char* address = nullptr;
};

// A kernel could not be launched. Nothing was written, and Python may try.
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
  // The device's current stream, as the driver knows it; null on the CPU.
  void* stream();
  Memory& memory(int32_t index) { return memories_[static_cast<size_t>(index)]; }
  // What each byte of an allocation is set to: nothing that a kernel forgets to write may look
  // right.
  const std::optional<uint8_t>& poison() const noexcept { return poison_; }

  char* address(const Pointer& pointer);
  c10::IValue value(const Operand& operand);
  at::Tensor tensor(const View& view);

 private:
  c10::TensorImpl* argument(Leaf leaf) const {
    const Argument& value = arguments_[leaf.argument];
    const Argument leaf_of = leaf.item < 0 ? value : value.item(static_cast<size_t>(leaf.item));
    return const_cast<c10::TensorImpl*>(leaf_of.tensor());
  }

  const Argument* arguments_;
  c10::Device device_;
  std::optional<uint8_t> poison_;
  std::optional<void*> stream_;
  c10::SmallVector<Memory, 6> memories_;
};

// How many forks lie between the first process and this one. What was recorded before a fork
// belongs to the parent: its device contexts do not survive one.
inline std::atomic<uint32_t> forks{0};

class Plan {
 public:
  // `keep`: what must live as long as the plan does (compiled kernels), a Python object.
  Plan(c10::Device device, std::vector<std::unique_ptr<Step>> steps, std::vector<Operand> outputs,
       size_t memories, bool watches_hooks, PythonRef keep);

  // Adds the results to a stack.
  void replay(const Argument* arguments, torch::jit::Stack& results,
              std::optional<uint8_t> poison = std::nullopt) const;

  const std::string& fingerprint() const noexcept { return fingerprint_; }
  std::string text() const;
  size_t launches() const noexcept;
  size_t bytes() const noexcept;
  // Whether it must not be replayed while Triton's launch hooks are set.
  bool watches_hooks() const noexcept { return watches_hooks_; }
  // Whether it was made by a process that this one was forked from.
  bool is_inherited() const noexcept { return forks_ != forks.load(std::memory_order_relaxed); }

 private:
  struct Scheduled {
    std::unique_ptr<Step> step;
    std::vector<int32_t> releases;  // memories that no later step or output needs
  };

  void schedule(std::vector<std::unique_ptr<Step>> steps);

  c10::Device device_;
  std::vector<Scheduled> steps_;
  std::vector<Operand> outputs_;
  size_t memories_;
  bool watches_hooks_;
  uint32_t forks_ = forks.load(std::memory_order_relaxed);
  PythonRef keep_;
  std::string fingerprint_;
};

// --------------------------------------------------------------------------- an override's plans

// A plan in a table, with the key that it is for.
struct PlanEntry {
  uint64_t hash = 0;
  std::vector<uint64_t> key;
  std::shared_ptr<const Plan> plan;
  std::string label;  // the key, for people
  mutable Counter replays;
  mutable uint64_t replays_before = 0;  // when an entry was last evicted; under the table's lock

  size_t bytes() const noexcept;
};

// Bounds of a table. A recording takes milliseconds, so that there may only be so many: some are
// free, more have to be earned by replays.
struct PlanLimits {
  size_t plans = 256;
  uint64_t free_recordings = 512;
  uint64_t replays_per_recording = 1024;
  uint32_t refusals = 16;           // keys refused, none ever recorded: the override is given up
  std::chrono::seconds refill{10};  // the least time between two clearings that give free ones back
};

// An override's plans by key. Bounded: the one that was used least since the last eviction goes.
// `find`, inside an epoch, `next` and `note` take no lock and allocate nothing.
class PlanTable {
 public:
  explicit PlanTable(PlanLimits limits);
  ~PlanTable();

  // Whether there are plans, for whoever asks at every call.
  const std::atomic<bool>& has_plans() const noexcept { return has_plans_; }
  // Null where there is none of this process.
  const PlanEntry* find(const PlanKey& key) const noexcept;

  // What to do about a call whose key has no plan.
  enum class Next : uint8_t {
    Wait,  // it was never seen before: it may never come again
    Record,
    Refused,  // it cannot be recorded
    Stopped,  // no more recordings for now
  };
  Next next(const PlanKey& key) const noexcept;
  // From now on the key was seen.
  void note(const PlanKey& key) noexcept;

  // Whether calls whose kernels are not compiled yet are native's, while somebody compiles them.
  bool is_gated() const noexcept { return gated_.load(std::memory_order_relaxed); }
  void gate(bool gated) noexcept { gated_.store(gated, std::memory_order_relaxed); }
  // Whether the kernels of a call are compiled.
  bool is_ready(const PlanKey& key) const noexcept;
  void set_ready(const PlanKey& key) noexcept;
  // Whether somebody was asked to compile them.
  bool is_asked(const PlanKey& key) const noexcept;
  void set_asked(const PlanKey& key) noexcept;  // counts how often it would have been needed
  uint32_t times_asked(const PlanKey& key) const noexcept;
  void forget(const PlanKey& key) noexcept;
  // Nobody was: whoever was asked forgot it, or is in another process.
  void forget_asked() noexcept;

  void count_replay(const PlanEntry& entry) noexcept {
    Counter::Shard& shard = Counter::shard();
    entry.replays.add(shard);
    const uint64_t count = replays_.add(shard);
    // Replays earn recordings; adding all shards up for every call would cost as much as the rest.
    if (C10_UNLIKELY(stopped()) && count % review_every_ == 0) review();
  }

  // Around a fork, so that the child finds nothing half done.
  static void lock() { mutex_.lock(); }
  static void unlock() { mutex_.unlock(); }

  void count_recording() noexcept {
    recordings_.fetch_add(1, std::memory_order_relaxed);
    review();
  }
  // False where the table was cleared since `generation`.
  bool install(const PlanKey& key, std::shared_ptr<const Plan> plan, std::string label,
               uint64_t generation);
  void refuse(const PlanKey& key);
  // Takes a plan out that failed, for good.
  void drop(const PlanKey& key);
  // Forgets everything; what is being recorded meanwhile is not installed. Free recordings come
  // back, if they did not just before: who switches an override all the time would record all the
  // time.
  void clear();
  uint64_t generation() const noexcept { return generation_.load(std::memory_order_relaxed); }
  uint64_t recordings() const noexcept { return recordings_.load(std::memory_order_relaxed); }
  bool stopped() const noexcept { return stopped_.load(std::memory_order_relaxed); }
  bool given_up() const noexcept { return given_up_.load(std::memory_order_relaxed); }
  // Whether Python runs what has no plan, also where the author finds that it does not pay: for
  // those who want to see every call run.
  bool runs_all() const noexcept { return runs_all_.load(std::memory_order_relaxed); }
  void run_all(bool all) noexcept { runs_all_.store(all, std::memory_order_relaxed); }
  std::vector<std::shared_ptr<const PlanEntry>> entries() const;

 private:
  struct Snapshot {
    uint64_t mask = 0;
    std::vector<std::pair<uint64_t, const PlanEntry*>> slots;
  };
  struct Seen;  // the keys that were seen, and that were refused

  // What was taken out, and goes once nobody can be reading it. Not under the lock: freeing a plan
  // may run Python.
  struct Garbage {
    std::vector<std::shared_ptr<const PlanEntry>> entries;
    std::unique_ptr<const Snapshot> snapshot;
  };

  // Whether recordings are used up, from now on.
  void review() noexcept;

  // Under the lock; returns the snapshot that was replaced.
  const Snapshot* publish();
  std::shared_ptr<const PlanEntry> evict();
  static void retire(Garbage garbage);

  PlanLimits limits_;
  std::atomic<const Snapshot*> snapshot_;
  std::unique_ptr<Seen> seen_;
  mutable Counter replays_;
  std::atomic<uint64_t> recordings_{0};
  std::atomic<uint64_t> generation_{0};
  std::atomic<uint32_t> refusals_{0};
  std::atomic<bool> stopped_{false};
  const uint64_t review_every_;
  std::atomic<bool> given_up_{false};
  std::atomic<bool> runs_all_{false};
  std::atomic<bool> gated_{false};
  std::atomic<bool> has_plans_{false};
  std::atomic<bool> any_{false};  // a plan was installed once
  std::optional<std::chrono::steady_clock::time_point>
      refilled_;  // under the lock, as what follows
  // One for all tables: a fork takes it first. Who has it runs no Python, and waits for nothing.
  static inline std::mutex mutex_;
  std::vector<std::shared_ptr<const PlanEntry>> entries_;
};

}  // namespace opgraft
