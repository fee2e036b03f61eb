// A counter for many threads, without contention for cache lines and without atomic
// read-modify-writes.
//
// Note [Counts by thread]
// Each thread has a shard of its own, which holds its count of every counter. No other thread
// writes to it, so adding is a load and a store, however many threads there are. A counter has an
// index, by which each shard finds its count. The total is the sum over all shards. A thread that
// ends releases its shard, and the next thread that claims it adds to the counts in it. So there
// are never more shards than there were threads at once. Shards and their chunks are never freed. A
// count that has no place in a shard (the thread has released its shard, the index is too large,
// memory is short) goes to a part that threads share.
//
// A counter can include another one, which then counts for several counters at once.
#pragma once

#include <c10/macros/Macros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace opgraft {

class Counter {
  static constexpr uint32_t kChunk = 512;   // counts in a chunk: 4 KB
  static constexpr uint32_t kChunks = 511;  // for some 260,000 counters at once
  static constexpr uint32_t kMaxCounters = kChunk * kChunks;

  struct alignas(64) Chunk {
    std::array<std::atomic<uint64_t>, kChunk> counts{};
  };

 public:
  // A thread's counts of all counters. Its thread creates chunks as counters need them.
  class Shard {
    friend class Counter;
    // The last one is never created: counters with index kMaxCounters look there.
    std::array<std::atomic<Chunk*>, kChunks + 1> chunks_{};
    std::atomic<bool> claimed_{true};
    Shard* next_ = nullptr;
  };

  Counter() : index_(indices().allocate()) {}
  ~Counter() {
    for (Shard* shard = shards_.load(std::memory_order_acquire); shard; shard = shard->next_) {
      if (Chunk* chunk = chunk_in(*shard)) {
        chunk->counts[index_ % kChunk].store(0, std::memory_order_relaxed);
      }
    }
    indices().release(index_);
  }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;

  void add() noexcept { add(shard()); }

  // Where each shard holds the count. A caller that keeps it need not read the counter itself.
  struct Place {
    uint32_t chunk, in_chunk;
  };
  Place place() const noexcept { return {index_ / kChunk, index_ % kChunk}; }
  // Adds to the counter at `place`. False if the thread has no shard yet, or that no place for it.
  static bool add_at(Place place) noexcept {
    if (C10_UNLIKELY(current_ == nullptr)) return false;
    Chunk* chunk = current_->chunks_[place.chunk].load(std::memory_order_relaxed);
    if (C10_UNLIKELY(chunk == nullptr)) return false;
    add_to(*chunk, place);
    return true;
  }

  // Adds in this thread's `shard()`, for callers that add to several counters in a row. Returns the
  // shard's new count.
  uint64_t add(Shard& shard) noexcept {
    Chunk* chunk = shard.chunks_[index_ / kChunk].load(std::memory_order_relaxed);
    if (C10_UNLIKELY(chunk == nullptr)) return add_first(shard);
    return add_to(*chunk, place());
  }

  // The calling thread's shard.
  static Shard& shard() noexcept { return C10_LIKELY(current_ != nullptr) ? *current_ : claim(); }

  // With what the included counters have.
  uint64_t total() const noexcept {
    const std::lock_guard<std::mutex> guard(indices().mutex);
    uint64_t sum = own_total();
    for (const auto& each : included_) sum += each->own_total();
    return sum;
  }

  // Adds to the total what `other` has and will count.
  void include(std::shared_ptr<const Counter> other) {
    const std::lock_guard<std::mutex> guard(indices().mutex);
    included_.push_back(std::move(other));
  }
  // Keeps what `other`, which is included, has counted, and no longer includes it. No thread adds
  // to it any more.
  void absorb(const Counter& other) noexcept {
    const std::lock_guard<std::mutex> guard(indices().mutex);
    const auto found = std::find_if(included_.begin(), included_.end(),
                                    [&other](const auto& each) { return each.get() == &other; });
    if (found == included_.end()) return;
    shared_.fetch_add(other.own_total(), std::memory_order_relaxed);
    // `other` lives on: its destructor would lock.
    included_.erase(found);
  }

  // Held around a fork, so that the child gets consistent state.
  static void lock() { indices().mutex.lock(); }
  static void unlock() { indices().mutex.unlock(); }

  // Called in the child of a fork, before `unlock`. Its only thread is the one that forked, so the
  // other threads' shards are free.
  static void forget_other_threads() noexcept {
    for (Shard* shard = shards_.load(std::memory_order_relaxed); shard; shard = shard->next_) {
      if (shard != current_) shard->claimed_.store(false, std::memory_order_relaxed);
    }
  }

 private:
  // The indices of counters.
  struct Indices {
    std::mutex mutex;
    std::vector<uint32_t> free;
    uint32_t used = 0;

    uint32_t allocate() {
      const std::lock_guard<std::mutex> guard(mutex);
      if (!free.empty()) {
        const uint32_t index = free.back();
        free.pop_back();
        return index;
      }
      if (used == kMaxCounters) return kMaxCounters;
      free.reserve(used + 1);  // so that `release` does not allocate, and cannot throw
      return used++;
    }
    void release(uint32_t index) noexcept {
      if (index == kMaxCounters) return;
      const std::lock_guard<std::mutex> guard(mutex);
      free.push_back(index);
    }
  };

  // Releases the shard when the thread ends. What the thread's later destructors count goes to the
  // shared part.
  struct Claim {
    ~Claim() {
      Shard* const mine = current_;
      current_ = &empty_shard();
      mine->claimed_.store(false, std::memory_order_release);
    }
  };

  // Never destroyed, because counters may outlive static destructors.
  static Indices& indices() {
    static auto* indices = new Indices();
    return *indices;
  }
  // A shard that never gets a chunk, for threads that have released theirs.
  static Shard& empty_shard() noexcept {
    static Shard* shard = new Shard();
    return *shard;
  }

  uint64_t own_total() const noexcept {
    uint64_t sum = shared_.load(std::memory_order_relaxed);
    for (Shard* shard = shards_.load(std::memory_order_acquire); shard; shard = shard->next_) {
      if (const Chunk* chunk = chunk_in(*shard)) {
        sum += chunk->counts[index_ % kChunk].load(std::memory_order_relaxed);
      }
    }
    return sum;
  }

  const Chunk* chunk_in(const Shard& shard) const noexcept {
    return shard.chunks_[index_ / kChunk].load(std::memory_order_acquire);
  }
  Chunk* chunk_in(Shard& shard) const noexcept {
    return shard.chunks_[index_ / kChunk].load(std::memory_order_acquire);
  }

  // No other thread writes to it.
  static uint64_t add_to(Chunk& chunk, Place place) noexcept {
    std::atomic<uint64_t>& count = chunk.counts[place.in_chunk];
    const uint64_t now = count.load(std::memory_order_relaxed) + 1;
    count.store(now, std::memory_order_relaxed);
    return now;
  }

  C10_NOINLINE uint64_t add_first(Shard& shard) noexcept {
    if (index_ < kMaxCounters && &shard != &empty_shard()) {
      if (auto* chunk = new (std::nothrow) Chunk()) {
        shard.chunks_[index_ / kChunk].store(chunk, std::memory_order_release);
        return add_to(*chunk, place());
      }
    }
    return shared_.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  C10_NOINLINE static Shard& claim() noexcept {
    for (Shard* shard = shards_.load(std::memory_order_acquire); shard; shard = shard->next_) {
      bool expected = false;
      if (shard->claimed_.compare_exchange_strong(expected, true, std::memory_order_acquire,
                                                  std::memory_order_relaxed)) {
        return adopt(*shard);
      }
    }
    auto* fresh = new (std::nothrow) Shard();
    if (fresh == nullptr) return empty_shard();
    Shard* first = shards_.load(std::memory_order_relaxed);
    do {
      fresh->next_ = first;
    } while (!shards_.compare_exchange_weak(first, fresh, std::memory_order_acq_rel,
                                            std::memory_order_relaxed));
    return adopt(*fresh);
  }

  static Shard& adopt(Shard& shard) noexcept {
    static thread_local const Claim claim;
    (void)claim;
    return *(current_ = &shard);
  }

  static inline std::atomic<Shard*> shards_{nullptr};  // all of them; a list that only grows
  static inline thread_local Shard* current_ __attribute__((tls_model("initial-exec"))) = nullptr;

  const uint32_t index_;
  std::atomic<uint64_t> shared_{0};
  std::vector<std::shared_ptr<const Counter>> included_;  // guarded by the mutex of the indices
};

}  // namespace opgraft
