// A counter that threads add to without contending for a cache line, and without an atomic
// read-modify-write.
//
// Note [Counts by thread]
// Each thread has a shard of its own, which holds its part of every counter, and which nobody else
// writes to: adding is a load and a store, however many threads there are. A counter is a number,
// by which its part is found in each shard; its total is the sum of those. A shard is given back
// when its thread ends, and the thread that takes it over goes on adding to what it holds, so there
// are never more of them than there were threads at once. They are never freed, and neither are the
// chunks that they consist of. What finds no place (a thread that is past the end of its shard, a
// counter beyond the number that shards have room for, no memory) is added to a part that threads
// share.
#pragma once

#include <c10/macros/Macros.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace opgraft {

class Counter {
  static constexpr uint32_t kChunk = 512;   // counts in a chunk: 4 KB
  static constexpr uint32_t kChunks = 511;  // for some 260,000 counters at once
  static constexpr uint32_t kMost = kChunk * kChunks;

  struct alignas(64) Chunk {
    std::array<std::atomic<uint64_t>, kChunk> counts{};
  };

 public:
  // A thread's part of all counters. Chunks are made by its thread as counters need them.
  class Shard {
    friend class Counter;
    // The last one is never made: counters without a place look there.
    std::array<std::atomic<Chunk*>, kChunks + 1> chunks_{};
    std::atomic<bool> claimed_{true};
    Shard* next_ = nullptr;
  };

  Counter() : number_(numbers().take()) {}
  ~Counter() {
    for (Shard* shard = shards_.load(std::memory_order_acquire); shard; shard = shard->next_) {
      if (Chunk* chunk = chunk_in(*shard)) {
        chunk->counts[number_ % kChunk].store(0, std::memory_order_relaxed);
      }
    }
    numbers().give_back(number_);
  }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;

  void add() noexcept { add(shard()); }

  // `shard`: what `shard()` gave this thread, for whoever adds to several counters in a row.
  // Returns what that shard has now.
  uint64_t add(Shard& shard) noexcept {
    Chunk* chunk = shard.chunks_[number_ / kChunk].load(std::memory_order_relaxed);
    if (C10_UNLIKELY(chunk == nullptr)) return add_first(shard);
    return add_to(*chunk);
  }

  // The calling thread's.
  static Shard& shard() noexcept { return C10_LIKELY(mine_ != nullptr) ? *mine_ : claim(); }

  uint64_t total() const noexcept {
    uint64_t sum = shared_.load(std::memory_order_relaxed);
    for (Shard* shard = shards_.load(std::memory_order_acquire); shard; shard = shard->next_) {
      if (const Chunk* chunk = chunk_in(*shard)) {
        sum += chunk->counts[number_ % kChunk].load(std::memory_order_relaxed);
      }
    }
    return sum;
  }

  // Around a fork, so that the child finds nothing half done.
  static void lock() { numbers().mutex.lock(); }
  static void unlock() { numbers().mutex.unlock(); }

  // In the child of a fork, between the two: its only thread is the one that forked, and the
  // others' shards are free.
  static void forget_other_threads() noexcept {
    for (Shard* shard = shards_.load(std::memory_order_relaxed); shard; shard = shard->next_) {
      if (shard != mine_) shard->claimed_.store(false, std::memory_order_relaxed);
    }
  }

 private:
  // The numbers that counters have.
  struct Numbers {
    std::mutex mutex;
    std::vector<uint32_t> free;
    uint32_t used = 0;

    uint32_t take() {
      const std::lock_guard<std::mutex> guard(mutex);
      if (!free.empty()) {
        const uint32_t number = free.back();
        free.pop_back();
        return number;
      }
      if (used == kMost) return kMost;
      free.reserve(used + 1);  // giving it back must not throw
      return used++;
    }
    void give_back(uint32_t number) noexcept {
      if (number == kMost) return;
      const std::lock_guard<std::mutex> guard(mutex);
      free.push_back(number);
    }
  };

  // Gives the shard back when the thread ends. What the thread's other destructors count is shared.
  struct Claim {
    ~Claim() {
      Shard* const mine = mine_;
      mine_ = &past_the_end();
      mine->claimed_.store(false, std::memory_order_release);
    }
  };

  // Never destroyed, as counters may outlive static destructors.
  static Numbers& numbers() {
    static auto* numbers = new Numbers();
    return *numbers;
  }
  // A shard without chunks, and that gets none.
  static Shard& past_the_end() noexcept {
    static Shard* shard = new Shard();
    return *shard;
  }

  const Chunk* chunk_in(const Shard& shard) const noexcept {
    return shard.chunks_[number_ / kChunk].load(std::memory_order_acquire);
  }
  Chunk* chunk_in(Shard& shard) const noexcept {
    return shard.chunks_[number_ / kChunk].load(std::memory_order_acquire);
  }

  // Nobody else writes it.
  uint64_t add_to(Chunk& chunk) noexcept {
    std::atomic<uint64_t>& count = chunk.counts[number_ % kChunk];
    const uint64_t now = count.load(std::memory_order_relaxed) + 1;
    count.store(now, std::memory_order_relaxed);
    return now;
  }

  C10_NOINLINE uint64_t add_first(Shard& shard) noexcept {
    if (number_ < kMost && &shard != &past_the_end()) {
      if (auto* chunk = new (std::nothrow) Chunk()) {
        shard.chunks_[number_ / kChunk].store(chunk, std::memory_order_release);
        return add_to(*chunk);
      }
    }
    return shared_.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  C10_NOINLINE static Shard& claim() noexcept {
    for (Shard* shard = shards_.load(std::memory_order_acquire); shard; shard = shard->next_) {
      bool taken = false;
      if (shard->claimed_.compare_exchange_strong(taken, true, std::memory_order_acquire,
                                                  std::memory_order_relaxed)) {
        return keep(*shard);
      }
    }
    auto* fresh = new (std::nothrow) Shard();
    if (fresh == nullptr) return past_the_end();
    Shard* first = shards_.load(std::memory_order_relaxed);
    do {
      fresh->next_ = first;
    } while (!shards_.compare_exchange_weak(first, fresh, std::memory_order_acq_rel,
                                            std::memory_order_relaxed));
    return keep(*fresh);
  }

  static Shard& keep(Shard& shard) noexcept {
    static thread_local const Claim claim;
    (void)claim;
    return *(mine_ = &shard);
  }

  static inline std::atomic<Shard*> shards_{nullptr};  // all of them; a list that only grows
  static inline thread_local Shard* mine_ __attribute__((tls_model("initial-exec"))) = nullptr;

  const uint32_t number_;
  std::atomic<uint64_t> shared_{0};
};

}  // namespace opgraft
