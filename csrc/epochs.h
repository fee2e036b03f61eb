// Safe reclamation of what readers read without a lock (epoch-based).
//
// Note [Epochs]
// A reader announces the epoch at which it began before it loads a published pointer, and takes the
// announcement back when it is done. A writer that has swapped the pointer begins a new epoch and
// frees what it took out once no reader is left that began before. Readers never wait and never
// allocate, apart from the first time on a thread.
//
// The announcement must be seen before the pointer is loaded. A fence in every reader would take as
// long as three conditions; where the kernel can make all threads of the process pass one
// (membarrier), the writer asks for that, and readers have none.
#pragma once

#include <c10/macros/Macros.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace opgraft {

class Epochs {
  static constexpr uint64_t kIdle = 0;

  struct alignas(64) Slot {
    std::atomic<uint64_t> began{kIdle};
    std::atomic<bool> claimed{true};
    uint32_t depth = 0;  // its thread's alone
  };

  // Plain pointers of this kind are read without a call into the dynamic linker, which takes as
  // long as a condition; the linker has room for a few of them whatever else is loaded.
  static inline thread_local Slot* mine_ __attribute__((tls_model("initial-exec"))) = nullptr;

 public:
  static Epochs& instance() {
    static auto* epochs = new Epochs();  // never destroyed: threads may outlive static destructors
    return *epochs;
  }

  class Reader {
   public:
    Reader() : slot_(C10_LIKELY(mine_ != nullptr) ? *mine_ : Epochs::slot()) {
      if (slot_.depth++ == 0) {
        // A release, although the fence orders it already: a writer that sees this announcement,
        // and not the end of the one before, must see what the thread read under that one as done.
        slot_.began.store(epoch_.load(std::memory_order_acquire), std::memory_order_release);
        if (C10_LIKELY(writers_fence_)) {
          std::atomic_signal_fence(std::memory_order_seq_cst);
        } else {
          std::atomic_thread_fence(std::memory_order_seq_cst);
        }
      }
    }
    ~Reader() {
      if (--slot_.depth == 0) slot_.began.store(kIdle, std::memory_order_release);
    }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    Slot& slot_;
  };

  // Runs `free` once no reader can hold what was unpublished before this call: before it returns,
  // unless a reader is slow. Then somebody has to `collect`.
  void retire(std::function<void()> free) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      retired_.emplace_back(epoch_.fetch_add(1, std::memory_order_seq_cst) + 1, std::move(free));
    }
    // A reader takes less than a microsecond, unless it loses its core meanwhile. The bound is for
    // those that wait for the GIL, which this thread may have.
    for (int attempt = 1; !collect() && attempt < kAttempts; ++attempt) std::this_thread::yield();
  }

  // Frees what was retired and no reader can hold any more; returns whether that was all. Freeing
  // may run Python: this is for threads that may wait for the GIL.
  bool collect() {
    std::vector<std::function<void()>> ready;
    bool all = false;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (retired_.empty()) return true;
      const uint64_t oldest = oldest_reader();
      std::vector<std::pair<uint64_t, std::function<void()>>> kept;
      for (auto& entry : retired_) {
        if (entry.first <= oldest) {
          ready.push_back(std::move(entry.second));
        } else {
          kept.push_back(std::move(entry));
        }
      }
      retired_ = std::move(kept);
      all = retired_.empty();
      left_.store(!all, std::memory_order_relaxed);
    }
    for (auto& run : ready) run();  // outside the lock
    return all;
  }

  // Whether there is something to collect, for whoever comes by with the GIL.
  static bool has_left() noexcept { return left_.load(std::memory_order_relaxed); }

  // Around a fork, so that the child finds nothing half done.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // In the child of a fork, between the two: its only thread is the one that forked. What the
  // others were reading when they vanished would be kept for good, and their slots with it.
  void forget_other_threads() noexcept {
    for (auto* slot : slots_) {
      if (slot == mine_) continue;
      slot->began.store(kIdle, std::memory_order_relaxed);
      slot->depth = 0;
      slot->claimed.store(false, std::memory_order_relaxed);
    }
  }

 private:
  Epochs() = default;

  static constexpr int kAttempts = 16;

  static Slot& slot();
  Slot& claim();

  // Under the lock: the epoch in which the oldest reader began, or the one that is now.
  uint64_t oldest_reader() const noexcept {
    const uint64_t now = epoch_.load(std::memory_order_seq_cst);
    // Where no thread ever read, none has to pass a fence: who begins now has waited for the mutex,
    // and loads what the writer published. Without the fence, who reads what cannot be told:
    // nothing is freed until there is one again.
    uint64_t oldest = slots_.empty() || !writers_fence_ || fence_readers() ? now : 0;
    for (const auto* slot : slots_) {
      const uint64_t began = slot->began.load(std::memory_order_seq_cst);
      if (began != kIdle && began < oldest) oldest = began;
    }
    return oldest;
  }

  static long membarrier(int command) noexcept {
    return syscall(SYS_membarrier, command, /*flags=*/0, /*cpu=*/0);
  }
  static bool can_fence() noexcept {
    constexpr long needed =
        MEMBARRIER_CMD_PRIVATE_EXPEDITED | MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED;
    const long known = membarrier(MEMBARRIER_CMD_QUERY);
    return known >= 0 && (known & needed) == needed;
  }
  static bool fence_readers() noexcept {
    // When it is first needed: in a process of several threads asking takes 7 ms, which `import
    // torch` would wait for.
    static const bool asked = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
    return asked && membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0;
  }

  // Whether the writer makes readers pass a fence. Not on kernels before 4.14, nor where a sandbox
  // forbids it.
  static inline const bool writers_fence_ = can_fence();
  static inline std::atomic<uint64_t> epoch_{1};
  static inline std::atomic<bool> left_{false};
  std::mutex mutex_;
  std::vector<Slot*> slots_;
  std::vector<std::pair<uint64_t, std::function<void()>>> retired_;
};

inline Epochs::Slot& Epochs::slot() {
  // Given back when the thread ends, and then used by a later one.
  struct Claim {
    Slot& slot = instance().claim();
    ~Claim() {
      mine_ = nullptr;
      slot.claimed.store(false, std::memory_order_release);
    }
  };
  static thread_local Claim claim;
  mine_ = &claim.slot;
  return claim.slot;
}

inline Epochs::Slot& Epochs::claim() {
  const std::lock_guard<std::mutex> guard(mutex_);
  for (auto* slot : slots_) {
    bool free = false;
    if (slot->claimed.compare_exchange_strong(free, true)) return *slot;
  }
  slots_.push_back(new Slot());
  return *slots_.back();
}

}  // namespace opgraft
