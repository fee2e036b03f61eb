// A counter that threads add to without contending for a cache line, and nearly always without an atomic
// read-modify-write.
#pragma once

#include <c10/macros/Macros.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace opgraft {

class Counter {
 public:
  void add() noexcept { add(shard()); }

  // `shard`: what `shard()` gave this thread, for whoever adds to several counters in a row. Returns what
  // that shard has now.
  uint64_t add(unsigned shard) noexcept {
    std::atomic<uint64_t>& count = shards_[shard].count;
    if (C10_UNLIKELY(shard == kShared)) return count.fetch_add(1, std::memory_order_relaxed) + 1;
    // Nobody else writes it.
    const uint64_t now = count.load(std::memory_order_relaxed) + 1;
    count.store(now, std::memory_order_relaxed);
    return now;
  }

  // The calling thread's: its own as long as it lives, or the one that is left for the threads that find
  // none free.
  static unsigned shard() noexcept { return C10_LIKELY(mine_ != kNone) ? mine_ : claim(); }

  uint64_t total() const noexcept {
    uint64_t sum = 0;
    for (const auto& shard : shards_) sum += shard.count.load(std::memory_order_relaxed);
    return sum;
  }

  // In the child of a fork: its only thread is the one that forked, and the others' shards are free.
  static void forget_other_threads() noexcept {
    const bool has_own = mine_ != kNone && mine_ != kShared;
    taken_.store(has_own ? uint32_t{1} << mine_ : 0, std::memory_order_relaxed);
  }

 private:
  static constexpr unsigned kShards = 16;
  static constexpr unsigned kShared = kShards - 1;
  static constexpr unsigned kNone = kShards;

  struct alignas(64) Shard {
    std::atomic<uint64_t> count{0};
  };

  // Gives the shard back when the thread ends. Whoever takes it over sees what was added to it.
  struct Claim {
    ~Claim() {
      if (mine_ < kShared) taken_.fetch_and(~(uint32_t{1} << mine_), std::memory_order_release);
      mine_ = kShared;  // for what the thread's other destructors call
    }
  };

  C10_NOINLINE static unsigned claim() noexcept {
    static thread_local const Claim claim;
    (void)claim;
    uint32_t taken = taken_.load(std::memory_order_relaxed);
    for (unsigned shard = 0; shard < kShared;) {
      const uint32_t bit = uint32_t{1} << shard;
      if ((taken & bit) != 0) {
        ++shard;
      } else if (taken_.compare_exchange_weak(taken, taken | bit, std::memory_order_acquire,
                                              std::memory_order_relaxed)) {
        return mine_ = shard;
      }
    }
    return mine_ = kShared;
  }

  static inline std::atomic<uint32_t> taken_{0};  // a bit for each shard that a thread has
  static inline thread_local unsigned mine_ __attribute__((tls_model("initial-exec"))) = kNone;

  std::array<Shard, kShards> shards_;
};

}  // namespace opgraft
