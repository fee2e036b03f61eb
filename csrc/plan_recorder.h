// Records a plan while an impl runs in Python.
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

// Between `start` and `stop` it sees every call of an op on its thread, by a thread-local
// RecordFunction callback. Adapters report kernel launches to it. What cannot be a step of a plan
// is a refusal: the impl runs on, but gives no plan.
class Recorder {
 public:
  // On what the impl runs: on tensors with memory, or on PyTorch's fake ones, in a process that may
  // have no such device. A plan of the latter can only be saved.
  enum class Tensors : uint8_t { Real, Fake };

  // `arguments`: the overridden op's. The recorder keeps them alive.
  Recorder(const c10::FunctionSchema& schema, std::vector<c10::IValue> arguments,
           c10::Device device, Tensors tensors = Tensors::Real);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // This thread's recorder; null if there is none.
  static Recorder* current() noexcept;

  void start();
  void stop() noexcept;

  // Only the first reason is stored.
  void refuse(const std::string& reason);
  const std::string& refusal() const noexcept { return refusal_; }
  c10::Device device() const noexcept { return device_; }
  // Whether an op is being called. The plan repeats the op as a whole.
  bool inside_op() const noexcept { return depth_ > 0; }

  // The origin of a tensor's address. Refuses if it is unknown.
  Pointer locate(const at::Tensor& tensor);
  // Refuses a kernel's integer argument if it is an address, because another call has other
  // addresses.
  void check_number(uint64_t number);
  // Allocates scratch memory for a kernel.
  Pointer scratch(size_t nbytes);
  void add(std::unique_ptr<Step> step) { steps_.push_back(std::move(step)); }
  void watch_hooks() noexcept { watches_hooks_ = true; }

  // The plan, given what the impl returned; null if something was refused.
  std::shared_ptr<const Plan> finish(const std::vector<c10::IValue>& results, PythonRef keep_alive);

 private:
  // The arguments on one storage.
  struct ArgumentStorage {
    TensorArgument first{};
    int64_t begin = 0, end = 0;  // the range of bytes that they span
    bool written = false;        // whether the op declares that it writes to one
  };
  // The origin of a tensor that the impl got or created.
  struct Origin {
    Pointer pointer;
    Operand::Kind kind = Operand::Kind::View;  // Argument and Result: the same tensor
  };
  // The metadata of an op's input from before the op ran.
  struct InputState {
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
  bool is_number(const at::Tensor& tensor) const;
  bool reads_values(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs) const;
  bool record_allocation(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs);

  bool is_dense(const at::Tensor& tensor) const;
  bool is_inside_fake_tensor() const;
  // A tensor's origin, by its identity or by its memory.
  std::optional<Origin> origin_of(const at::Tensor& tensor) const;
  void track(const at::Tensor& tensor, const Pointer& pointer, Operand::Kind kind);
  void track_view(const at::Tensor& tensor);
  int32_t track_memory(const at::Tensor& tensor, Operand::Kind kind);
  bool may_write(const at::Tensor& tensor) const;
  at::Tensor argument_tensor(const TensorArgument& argument) const;
  bool is_on_argument(const at::Tensor& tensor) const;
  // Whether a tensor is within the memory that the arguments on its storage span.
  bool is_within(const at::Tensor& tensor, const Pointer& pointer) const;
  std::optional<Operand> operand(const c10::IValue& value, const std::string& consumer);
  std::optional<Operand> operand(const at::Tensor& tensor, const std::string& consumer);

  c10::FunctionSchema schema_;
  std::vector<c10::IValue> arguments_;
  c10::Device device_;
  Tensors tensors_;
  std::string refusal_;
  std::vector<std::unique_ptr<Step>> steps_;
  size_t memories_ = 0;
  bool watches_hooks_ = false;

  // Keeps tensors alive during the recording, so that no address or object is reused.
  std::vector<at::Tensor> alive_;
  std::unordered_map<const c10::TensorImpl*, Origin> origins_;
  std::unordered_map<const c10::StorageImpl*, int32_t> memory_of_;
  std::unordered_map<const c10::StorageImpl*, ArgumentStorage> argument_storages_;

  at::CallbackHandle callback_ = 0;
  bool started_ = false;
  int depth_ = 0;
  std::vector<c10::IValue> inputs_;  // inputs of the running op
  std::vector<InputState> inputs_before_;
  bool nested_reads_value_ = false;        // the running op calls one that reads a value
  bool nested_has_dynamic_shape_ = false;  // it calls one whose output shape depends on values
};

}  // namespace opgraft
