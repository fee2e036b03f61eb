// An impl with launch plans: replays them, and lets Python record the missing ones.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "condition.h"
#include "plan.h"
#include "python_impl.h"
#include "router.h"

namespace opgraft {

// While it lives, this thread's calls of one override, whose table it gets, run its impl whether or
// not their kernels are compiled: somebody has decided that for them. Other overrides' calls inside
// do not. Nests.
class RunUnready {
 public:
  explicit RunUnready(const PlanTable* table) noexcept : before_(table_) { table_ = table; }
  ~RunUnready() { table_ = before_; }
  RunUnready(const RunUnready&) = delete;
  RunUnready& operator=(const RunUnready&) = delete;

  static bool here(const PlanTable* table) noexcept { return table_ == table; }

 private:
  const PlanTable* before_;
  static inline thread_local const PlanTable* table_ __attribute__((tls_model("initial-exec"))) =
      nullptr;
};

class PlannedImpl final : public Impl {
 public:
  struct Options {
    std::shared_ptr<PlanTable> table;
    std::shared_ptr<const PythonConverter> converter;
    PythonRef override;
    // record(override, keyset, values, key) -> result: of a hit that is recorded or tried, or of
    // native where a plan is compared with it.
    PythonRef record;
    PythonRef is_capturing;  // is_capturing() -> bool, as PythonHooks has it
    // ask(override, keyset, values, key) -> whether the call waits for its kernels. If not, they
    // are compiled while native serves. Called only if the table is gated.
    PythonRef ask;
    // For which calls without a plan the impl is worth running in Python; nullopt: for all, while
    // recordings are left.
    std::optional<Condition> unplanned;
    // For which calls no random numbers matter; nullopt: for all. What runs the others depends on
    // the call alone, not on what was compiled or recorded by then: one may run a second time, and
    // must draw the same numbers (python/opgraft/router/randomness.py).
    std::optional<Condition> without_random_numbers;
    bool takes_keyset = false;
    bool writes = false;  // the op writes to its arguments
  };

  PlannedImpl(std::unique_ptr<Impl> impl, Options options);

  bool run(const Override& override, Call& call, c10::Device device) override;
  UnboxedDecision decide_unboxed(const Override& override, c10::ArrayRef<Argument> arguments,
                                 bool condition_holds) override;
  bool replay_unboxed(const Override& override, const PlanEntry& entry, const Argument* arguments,
                      torch::jit::Stack& results) override;
  bool takes(const Override& override, Call& call) override { return impl_->takes(override, call); }
  bool quarantine(const Call& call) override { return impl_->quarantine(call); }
  bool is_quarantined(const Call& call) override { return impl_->is_quarantined(call); }
  bool has_quarantined() override { return impl_->has_quarantined(); }

 private:
  enum class ReplayResult { Replayed, NoPlan, HooksSet, Unproven };

  // Whether what runs a call depends on the call alone: it has no plan, and its kernels are not
  // compiled while native serves.
  bool is_routed_by_itself(const Argument* arguments) const;
  ReplayResult replay(const Override& override, Call& call, const PlanKey& key);
  bool run_unplanned(const Override& override, Call& call, c10::Device device, bool in_python);
  bool may_run_in_python(PlanTable::Action action) const;
  // Whether the kernels of a call without a plan are ready, so that it may run or be recorded.
  enum class Kernels : uint8_t { Ready, NotReady, NotAskedFor };
  Kernels kernels(const PlanKey& key) const noexcept;
  bool needs_kernels(PlanTable::Action action, const Argument* arguments) const;
  bool ask_for_kernels(Call& call, const PlanKey& key) const;
  // Whether a call without a plan is to run in Python. `in_python`: whether any such call may.
  bool is_worth_python(const Argument* arguments, bool in_python) const;
  void count_replay(const Override& override, const PlanEntry& entry) const;
  bool record(const Override& override, Call& call, c10::Device device, const PlanKey& key);
  // Native serves the call, and Python compares the plan with it. Returns false in a capture.
  bool prove(const Override& override, Call& call, c10::Device device, const PlanKey& key);
  static bool miss(const Override& override);
  bool is_capturing(c10::Device device) const;
  void run_recording(Call& call, const PlanKey& key);

  std::unique_ptr<Impl> impl_;
  Options options_;
};

// Triton calls the functions in these lists around each launch, for instance a profiler's. Plans of
// Triton's kernels are not replayed while a list is not empty. `holders` are dictionaries: if one
// gets more entries than it has now, the lists may have been replaced by others, and `changed()`
// returns whether hooks are set.
void watch_launch_hooks(const std::vector<py::list>& lists, const std::vector<py::dict>& holders,
                        py::object changed);

// Plans, tables and recorders, for Python.
void bind_plans(py::module_& core);

}  // namespace opgraft
