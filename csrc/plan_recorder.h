// Watches an impl run in Python, and makes a plan of what it did.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan.h"
#include "plan_steps.h"

namespace opgraft {

// Between `start` and `stop` it sees every call of an op on its thread, through a RecordFunction
// callback of that thread's; kernels are told to it. What it cannot make a step of is a refusal:
// the impl never notices, and there is no plan.
class Recorder {
 public:
  // `arguments`: of the overridden op, which stay alive as long as the recorder.
  Recorder(const c10::FunctionSchema& schema, std::vector<c10::IValue> arguments,
           c10::Device device);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The recorder that watches this thread; null if there is none.
  static Recorder* current() noexcept;

  void start();
  void stop() noexcept;

  // The first reason counts.
  void refuse(const std::string& reason);
  const std::string& refusal() const noexcept { return refusal_; }
  c10::Device device() const noexcept { return device_; }
  // Whether what happens now is inside a call of an op, which the plan repeats as a whole.
  bool inside_op() const noexcept { return depth_ > 0; }

  // Where a tensor's address comes from; refuses where nobody knows.
  Pointer locate(const at::Tensor& tensor);
  // Refuses a number that a kernel gets, if it is an address: where another call has other memory.
  void check_number(uint64_t number);
  // Memory that a kernel needs and nobody returns.
  Pointer scratch(size_t nbytes);
  void add(std::unique_ptr<Step> step) { steps_.push_back(std::move(step)); }
  void watch_hooks() noexcept { watches_hooks_ = true; }

  // The plan, given what the impl returned; null where something was refused.
  std::shared_ptr<const Plan> finish(const std::vector<c10::IValue>& results, PythonRef keep);

 private:
  // The arguments on one storage.
  struct Shared {
    Leaf first{};
    int64_t begin = 0, end = 0;  // what they span, in bytes of the storage
    bool written = false;        // by the op, as its schema says
  };
  // A tensor that the impl has had in its hands.
  struct Known {
    Pointer pointer;
    Operand::Kind kind = Operand::Kind::View;  // Argument and Result: the very tensor
  };
  // An input of an op as it was before the op ran.
  struct Before {
    at::Tensor tensor;
    const c10::StorageImpl* storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
  };
  struct Context;

  void begin_op(const at::RecordFunction& function);
  void begin_nested_op(const at::RecordFunction& function);
  void end_op(const at::RecordFunction& function);
  void record_op(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs);
  bool check_inputs(const c10::OperatorHandle& op);
  bool reads_key(const c10::OperatorHandle& op) const;
  bool reads_values(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs) const;
  bool record_allocation(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs);

  // What is known of a tensor: itself, or the memory that it is on.
  std::optional<Known> find(const at::Tensor& tensor) const;
  void learn(const at::Tensor& tensor, const Pointer& pointer, Operand::Kind kind);
  void learn_view(const at::Tensor& tensor);
  int32_t learn_memory(const at::Tensor& tensor, Operand::Kind kind);
  bool may_write(const at::Tensor& tensor) const;
  at::Tensor at(const Leaf& leaf) const;
  bool is_on_argument(const at::Tensor& tensor) const;
  // Whether a tensor lies within the memory that the arguments on its storage span.
  bool is_within(const at::Tensor& tensor, const Pointer& pointer) const;
  std::optional<Operand> operand(const c10::IValue& value, const std::string& user);
  std::optional<Operand> operand(const at::Tensor& tensor, const std::string& user);

  c10::FunctionSchema schema_;
  std::vector<c10::IValue> arguments_;
  c10::Device device_;
  std::string refusal_;
  std::vector<std::unique_ptr<Step>> steps_;
  size_t memories_ = 0;
  bool watches_hooks_ = false;

  // Tensors stay alive while they are recorded, so that no address or object is used twice.
  std::vector<at::Tensor> alive_;
  std::unordered_map<const c10::TensorImpl*, Known> known_;
  std::unordered_map<const c10::StorageImpl*, int32_t> memory_of_;
  std::unordered_map<const c10::StorageImpl*, Shared> arguments_on_;

  at::CallbackHandle callback_ = 0;
  bool started_ = false;
  int depth_ = 0;
  std::vector<c10::IValue> inputs_;  // of the op that is running
  std::vector<Before> before_;
  bool reads_inside_ = false;   // it calls an op that reads a value
  bool shapes_inside_ = false;  // it calls one whose shape depends on values
};

}  // namespace opgraft
