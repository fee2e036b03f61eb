// Epoch-based reclamation: safely frees objects that readers access without a lock.
//
// Note [Epochs]
// A reader announces the epoch at which it begins before it loads a published pointer, and
// withdraws the announcement at its end. A writer swaps the pointer, begins a new epoch, and frees
// the old object once no reader is left that began before. Readers never wait. They allocate only
// the first time on a thread.
//
// The announcement must be visible before the pointer is loaded. A fence in every reader would take
// as long as three conditions. If the operating system can make all threads of the process execute
// a fence (membarrier), the writer asks for that instead, and readers need none.
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
    uint32_t depth = 0;  // used only by its thread
  };

  // With this TLS model a plain pointer is read without a call into the dynamic linker, which takes
  // as long as a condition. The linker always reserves room for a few of them.
  static inline thread_local Slot* current_ __attribute__((tls_model("initial-exec"))) = nullptr;
  static inline thread_local bool is_over_ = false;  // whether this thread has released its slot

 public:
  static Epochs& instance() {
    static auto* epochs = new Epochs();  // never destroyed: threads may outlive static destructors
    return *epochs;
  }

  class Reader {
   public:
    C10_ALWAYS_INLINE Reader()
        : slot_(C10_LIKELY(current_ != nullptr) ? *current_ : Epochs::slot()) {
      if (slot_.depth++ == 0) announce(slot_);
    }
    C10_ALWAYS_INLINE ~Reader() {
      if (--slot_.depth == 0) slot_.began.store(kIdle, std::memory_order_release);
    }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    Slot& slot_;
  };

  // A reader inside which there is no other one, and which calls nothing.
  class QuickReader {
   public:
    // Whether this thread has read before, and does not read now. Otherwise only a `Reader` may.
    static bool is_possible() noexcept {
      return C10_LIKELY(current_ != nullptr) &&
             C10_LIKELY(current_->began.load(std::memory_order_relaxed) == kIdle);
    }

    C10_ALWAYS_INLINE QuickReader() : slot_(*current_) { announce(slot_); }
    C10_ALWAYS_INLINE ~QuickReader() { slot_.began.store(kIdle, std::memory_order_release); }
    QuickReader(const QuickReader&) = delete;
    QuickReader& operator=(const QuickReader&) = delete;

   private:
    Slot& slot_;
  };

  // Runs `free` once no reader can hold what was unpublished before this call. That is before it
  // returns, unless a reader is slow. Then a later `collect` runs it.
  void retire(std::function<void()> free) {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      retired_.emplace_back(epoch_.fetch_add(1, std::memory_order_seq_cst) + 1, std::move(free));
    }
    // A reader takes less than a microsecond, unless it is descheduled. The number of attempts is
    // bounded because a reader may be waiting for the GIL, which this thread may hold.
    for (int attempt = 1; !collect() && attempt < kAttempts; ++attempt) std::this_thread::yield();
  }

  // Frees what was retired and no reader can hold any more. Returns whether nothing is left.
  // Freeing may run Python, so the calling thread must be able to wait for the GIL.
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
      has_retired_.store(!all, std::memory_order_relaxed);
    }
    for (auto& run : ready) run();  // outside the lock
    return all;
  }

  // Whether there is something to collect. Threads that have the GIL check this.
  static bool has_retired() noexcept { return has_retired_.load(std::memory_order_relaxed); }

  // Held around a fork, so that the child gets consistent state.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // Called in the child of a fork, before `unlock`. Its only thread is the one that forked. Without
  // this, objects that the other threads were reading would never be freed, nor their slots.
  void forget_other_threads() noexcept {
    for (auto* slot : slots_) {
      if (slot == current_) continue;
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

  static C10_ALWAYS_INLINE void announce(Slot& slot) noexcept {
    // A release store, although the fence below already orders it before the pointer's load: a
    // writer that sees this announcement, but not the end of the previous one, must see the
    // previous reads as finished.
    slot.began.store(epoch_.load(std::memory_order_acquire), std::memory_order_release);
    if (C10_LIKELY(writers_fence_)) {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    } else {
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
  }

  // The epoch in which the oldest reader began, or the present one. Needs the lock.
  uint64_t oldest_reader() const noexcept {
    const uint64_t now = epoch_.load(std::memory_order_seq_cst);
    // If no thread ever read, no fence is needed: a reader that begins now has waited for the
    // mutex, and loads what the writer published. If the fence fails, it is unknown what readers
    // hold, so nothing is freed until one succeeds.
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
    // Registered when it is first needed: with several threads that takes 7 ms, which `import
    // torch` would spend.
    static const bool asked = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
    return asked && membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0;
  }

  // Whether the writer executes a fence in readers. Linux before 4.14 cannot, and sandboxes may
  // forbid it.
  static inline const bool writers_fence_ = can_fence();
  static inline std::atomic<uint64_t> epoch_{1};
  static inline std::atomic<bool> has_retired_{false};
  std::mutex mutex_;
  std::vector<Slot*> slots_;
  std::vector<std::pair<uint64_t, std::function<void()>>> retired_;
};

inline Epochs::Slot& Epochs::slot() {
  // Released when the thread ends, for a later thread to claim.
  struct Claim {
    Slot& slot = instance().claim();
    ~Claim() {
      current_ = nullptr;
      is_over_ = true;
      slot.claimed.store(false, std::memory_order_release);
    }
  };
  // A destructor of the thread's that runs after that may still read. Its slot stays claimed.
  if (C10_UNLIKELY(is_over_)) return *(current_ = &instance().claim());
  static thread_local Claim claim;
  current_ = &claim.slot;
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
