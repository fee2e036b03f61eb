// Plans as JSON can write them, and plans made of that: in another process, on another device.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plan.h"
#include "python.h"

namespace opgraft {

// Note [What a saved plan says]
//
// {"memories": count, "hooks": whether Triton's launch hooks matter, "steps": [...], "outputs":
// [...]}. Functions are numbers: in a plan of this process they are addresses, in one that was
// recorded without a device whatever the adapter said, and `load_plan` is told what each number
// stands for. No address, no index of a device and no allocator is in it. `saved()` of each step in
// plan_saving.cpp says what its list holds, and `PlanReader` reads it.

// A plan cannot be saved, or what was saved is no plan.
class SavingError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Needs the GIL, as the functions below do.
py::dict saved_plan(const Plan& plan);

// A plan that does what a saved one says, for the op's calls on `device`.
//
// `functions`: the address of each function, by its number in `saved`. `keep_alive` lives as long
// as the plan.
std::shared_ptr<Plan> load_plan(const c10::FunctionSchema& schema, const py::dict& saved,
                                std::vector<uint64_t> functions, c10::Device device,
                                py::object keep_alive);

}  // namespace opgraft
