// What of the core threads share without a lock, alone and under load: for the sanitizers, which
// know nothing of what torch and Python do meanwhile, as those are not built for them. Ends with 0,
// or says what is wrong.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "counter.h"
#include "epochs.h"

namespace {

using opgraft::Counter;
using opgraft::Epochs;

constexpr uint64_t kAlive = 0x600dc0de;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::abort();
}

// What is published: freed memory is told by the sanitizer, and by `mark`.
struct Table {
  uint64_t mark = kAlive;
  std::vector<std::shared_ptr<Counter>> counters;
  ~Table() { mark = 0; }
};

std::atomic<const Table*> published{nullptr};
std::atomic<bool> stop{false};
std::atomic<int64_t> alive{0};

void publish(std::unique_ptr<const Table> fresh) {
  if (fresh) alive.fetch_add(1);
  const Table* old = published.exchange(fresh.release(), std::memory_order_seq_cst);
  if (old == nullptr) return;
  Epochs::instance().retire([old] {
    delete old;
    alive.fetch_sub(1);
  });
}

// As the router reads a chain, nested as where an impl calls the op again.
void read() {
  const Epochs::Reader reader;
  const Table* table = published.load(std::memory_order_seq_cst);
  if (table == nullptr) return;
  check(table->mark == kAlive, "a reader got what was freed");
  check(!Epochs::QuickReader::is_possible(), "a quick reader would end another one");
  const Epochs::Reader nested;
  for (const auto& counter : table->counters) counter->add();
  check(table->mark == kAlive, "what a reader had was freed");
}

// As it reads a chain of which every override misses at once.
void read_quickly() {
  if (!Epochs::QuickReader::is_possible()) return read();
  const Epochs::QuickReader reader;
  const Table* table = published.load(std::memory_order_seq_cst);
  if (table == nullptr) return;
  check(table->mark == kAlive, "a quick reader got what was freed");
  for (const auto& counter : table->counters) {
    if (!Counter::add_at(counter->place())) counter->add();
  }
  check(table->mark == kAlive, "what a quick reader had was freed");
}

void read_for_long(void (&read)()) {
  while (!stop.load(std::memory_order_relaxed)) read();
}

// Reads when its thread has released what it had.
struct LateReader {
  ~LateReader() {
    for (int i = 0; i < 20; ++i) read_quickly();
  }
};

// Threads that come and go: slots and shards are taken over.
void read_on_short_threads() {
  // A slot that such a thread claims late stays its own: so few.
  for (int thread = 0; !stop.load(std::memory_order_relaxed); ++thread) {
    std::thread([reads_late = thread % 64 == 0] {
      if (reads_late) {
        static thread_local const LateReader late;
        (void)late;
      }
      for (int i = 0; i < 20; ++i) read();
    }).join();
  }
}

void write() {
  for (uint64_t round = 0; !stop.load(std::memory_order_relaxed); ++round) {
    auto table = std::make_unique<Table>();
    for (uint64_t i = 0; i < round % 5; ++i) table->counters.push_back(std::make_shared<Counter>());
    publish(std::move(table));
    if (round % 7 == 0) Epochs::instance().collect();
  }
}

void reclamation(std::chrono::milliseconds time) {
  std::vector<std::thread> threads;
  for (auto* each : {&read, &read, &read_quickly})
    threads.emplace_back([each] { read_for_long(*each); });
  for (int i = 0; i < 2; ++i) threads.emplace_back(write);
  threads.emplace_back(read_on_short_threads);
  std::this_thread::sleep_for(time);
  stop.store(true);
  for (auto& thread : threads) thread.join();
  publish(nullptr);
  check(Epochs::instance().collect(), "something is kept that nobody reads");
  check(alive.load() == 0, "something was never freed");
}

void counting() {
  constexpr int kThreads = 24, kCounters = 1500, kTimes = 20;
  std::vector<std::unique_ptr<Counter>> counters;
  for (int i = 0; i < kCounters; ++i) counters.push_back(std::make_unique<Counter>());
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&counters] {
      for (int time = 0; time < kTimes; ++time) {
        for (const auto& counter : counters) counter->add();
        Counter passing;
        check(passing.total() == 0, "a counter does not start at zero");
        passing.add();
        check(passing.total() == 1, "a counter counts what is another's");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& counter : counters) {
    check(counter->total() == uint64_t{kThreads} * kTimes, "a count was lost");
  }
}

}  // namespace

int main(int arguments, char** values) {
  counting();
  reclamation(std::chrono::milliseconds(arguments > 1 ? std::atoi(values[1]) : 1000));
  std::puts("as it should be");
  return 0;
}
