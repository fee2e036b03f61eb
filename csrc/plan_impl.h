// An impl with launch plans: replays what is recorded, and has Python record the rest.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "condition.h"
#include "plan.h"
#include "python_impl.h"
#include "router.h"

namespace opgraft {

class PlannedImpl final : public Impl {
 public:
  struct Options {
    std::shared_ptr<PlanTable> table;
    std::shared_ptr<const Signature> signature;
    PythonRef override;
    PythonRef record;     // record(override, keyset, values, key) -> result
    PythonRef capturing;  // capturing() -> bool, as PythonHooks has it
    // ask(override, keyset, values, key) -> whether the call is to wait for its kernels; else they
    // are compiled while native serves. Only where the table is gated.
    PythonRef ask;
    // Which calls are worth the impl in Python where no plan replays them; none: all, as long as
    // there may be recordings.
    std::optional<Condition> unplanned;
    bool takes_keyset = false;
    bool writes = false;  // the op writes to its arguments
  };

  PlannedImpl(std::unique_ptr<Impl> impl, Options options);

  bool run(const Override& override, Call& call, c10::Device device) override;
  Early early(const Override& override, c10::ArrayRef<Argument> arguments, bool holds) override;
  bool replay_early(const Override& override, const PlanEntry& entry, const Argument* arguments,
                    torch::jit::Stack& results) override;
  bool wants(const Override& override, Call& call) override { return impl_->wants(override, call); }
  bool quarantine(const Call& call) override { return impl_->quarantine(call); }
  bool is_quarantined(const Call& call) override { return impl_->is_quarantined(call); }
  bool has_quarantined() override { return impl_->has_quarantined(); }

 private:
  enum class Replayed { Yes, NoPlan, NotWhileHooked };

  Replayed replay(const Override& override, Call& call, const PlanKey& key);
  bool run_unplanned(const Override& override, Call& call, c10::Device device, bool in_python);
  bool may_run_in_python(PlanTable::Next next) const;
  // Whether a call that has no plan may run, or be recorded, as far as its kernels are concerned.
  enum class Kernels : uint8_t { Ready, NotReady, NotAskedFor };
  Kernels kernels(const PlanKey& key) const noexcept;
  bool needs_kernels(PlanTable::Next next, const Argument* arguments) const;
  bool ask_for_kernels(Call& call, const PlanKey& key) const;
  // Whether a call that has no plan is to run in Python; `in_python`: where that would pay.
  bool pays(const Argument* arguments, bool in_python) const;
  void replayed(const Override& override, const PlanEntry& entry) const;
  bool record(const Override& override, Call& call, c10::Device device, const PlanKey& key);

  std::unique_ptr<Impl> impl_;
  Options options_;
};

// Triton calls the functions in these lists around each launch, a profiler's for instance: plans of
// Triton's kernels are not replayed while one of them holds something. `holders` are dictionaries
// in which an entry more than now means that someone put other hooks in the lists' place;
// `changed()` then says whether that is so.
void watch_launch_hooks(const std::vector<py::list>& lists, const std::vector<py::dict>& holders,
                        py::object changed);

// Plans, tables and recorders, for Python.
void bind_plans(py::module_& core);

}  // namespace opgraft
