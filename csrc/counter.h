// A counter that threads add to without contending for a cache line.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace opgraft {

class Counter {
 public:
  void add() noexcept { add(shard()); }

  // `shard`: what `shard()` gave this thread, for whoever adds to several counters in a row.
  void add(unsigned shard) noexcept {
    shards_[shard].count.fetch_add(1, std::memory_order_relaxed);
  }

  // Threads take shards in turn; two that meet in one still lose nothing.
  static unsigned shard() noexcept {
    static std::atomic<unsigned> next{0};
    static thread_local unsigned mine __attribute__((tls_model("initial-exec"))) = kShards;
    if (mine == kShards) mine = next.fetch_add(1, std::memory_order_relaxed) % kShards;
    return mine;
  }

  uint64_t total() const noexcept {
    uint64_t sum = 0;
    for (const auto& shard : shards_) sum += shard.count.load(std::memory_order_relaxed);
    return sum;
  }

 private:
  static constexpr unsigned kShards = 8;
  struct alignas(64) Shard {
    std::atomic<uint64_t> count{0};
  };

  std::array<Shard, kShards> shards_;
};

}  // namespace opgraft
