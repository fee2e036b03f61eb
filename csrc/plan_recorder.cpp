#include "plan_recorder.h"

#include <ATen/core/enum_tag.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

namespace opgraft {

namespace {

thread_local Recorder* current_recorder = nullptr;

constexpr std::string_view kAllocations[] = {"aten::empty", "aten::empty_like", "aten::new_empty",
                                             "aten::empty_strided", "aten::new_empty_strided"};
// Ops that tell of metadata, which a plan's key holds.
constexpr std::string_view kMetadata[] = {
    "aten::size",          "aten::stride",        "aten::numel",       "aten::dim",
    "aten::storage_offset", "aten::sym_size",     "aten::sym_stride",  "aten::sym_numel",
    "aten::sym_storage_offset", "aten::is_contiguous", "aten::sym_is_contiguous",
    "aten::is_same_size",  "aten::result_type",   "aten::can_cast",    "aten::promote_types",
    "aten::is_floating_point", "aten::is_complex", "aten::is_signed",
};

constexpr std::string_view kNumbers[] = {"aten::item", "aten::_local_scalar_dense",
                                         "aten::is_nonzero"};

template <size_t Size>
bool is_among(const std::string_view (&names)[Size], const std::string& name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

int64_t byte_offset(const at::Tensor& tensor) {
  return tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool is_dense(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet odd{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                    c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
                                    c10::DispatchKey::Functionalize};
  return tensor.layout() == c10::kStrided && tensor.has_storage() &&
         !tensor.key_set().has_any(odd) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Every tensor of a value, those of lists too; undefined ones are passed by.
template <class Visit>
void each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor(), -1);
  } else if (value.isList()) {
    int32_t index = 0;
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor(), index);
      ++index;
    }
  }
}

// Whether a value holds tensors and nothing else.
bool is_tensors(const c10::IValue& value) {
  if (value.isTensor()) return true;
  if (!value.isList()) return false;
  const auto items = value.toListRef();
  return std::all_of(items.begin(), items.end(),
                     [](const c10::IValue& item) { return item.isTensor() || item.isNone(); });
}

bool is_constant(const c10::IValue& value) {
  if (value.isList()) {
    const auto items = value.toListRef();
    return std::all_of(items.begin(), items.end(), is_constant);
  }
  return value.isNone() || value.isInt() || value.isDouble() || value.isBool() ||
         value.isComplexDouble() || value.isString() || value.isDevice();
}

}  // namespace

// Marks the callbacks of ops; other observed functions (autograd's, in Python) are looked through.
struct Recorder::Context : at::ObserverContext {};

Recorder::Recorder(const c10::FunctionSchema& schema, std::vector<c10::IValue> arguments,
                   c10::Device device)
    : schema_(schema), arguments_(std::move(arguments)), device_(device) {
  for (size_t index = 0; index < arguments_.size(); ++index) {
    each_tensor(arguments_[index], [&](const at::Tensor& tensor, int32_t item) {
      const Leaf leaf{static_cast<int32_t>(index), item};
      if (known_.count(tensor.unsafeGetTensorImpl()) > 0) return;  // the key tells that it is one
      Pointer pointer;
      pointer.base = Pointer::Base::Argument;
      pointer.leaf = leaf;
      learn(tensor, pointer, Operand::Kind::Argument);
      arguments_on_[storage_of(tensor)].push_back(leaf);
    });
  }
}

Recorder::~Recorder() {
  stop();
}

Recorder* Recorder::current() noexcept {
  return current_recorder;
}

void Recorder::start() {
  TORCH_CHECK(current_recorder == nullptr, "something is being recorded on this thread already");
  current_recorder = this;
  started_ = true;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            Recorder* recorder = current_recorder;
            if (recorder == nullptr || !function.operator_name()) return nullptr;
            if (recorder->depth_++ == 0) recorder->begin_op(function);
            return std::make_unique<Context>();
          },
          [](const at::RecordFunction& function, at::ObserverContext* context) {
            Recorder* recorder = current_recorder;
            if (recorder == nullptr || context == nullptr) return;
            if (--recorder->depth_ == 0) recorder->end_op(function);
          })
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION}));
}

void Recorder::stop() noexcept {
  if (!started_) return;
  started_ = false;
  current_recorder = nullptr;
  at::removeCallback(callback_);
}

void Recorder::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

// --------------------------------------------------------------------------- what is known

std::optional<Recorder::Known> Recorder::find(const at::Tensor& tensor) const {
  const auto known = known_.find(tensor.unsafeGetTensorImpl());
  if (known != known_.end()) return known->second;
  // It came about in a way that nobody saw (`.data`): its memory tells.
  Pointer pointer;
  if (const auto memory = memory_of_.find(storage_of(tensor)); memory != memory_of_.end()) {
    pointer.base = Pointer::Base::Memory;
    pointer.memory = memory->second;
    pointer.offset = byte_offset(tensor);
    return Known{pointer, Operand::Kind::View};
  }
  const auto arguments = arguments_on_.find(storage_of(tensor));
  // Of two arguments on one memory (q and k of one qkv), it could be either's.
  if (arguments == arguments_on_.end() || arguments->second.size() > 1) return std::nullopt;
  const Leaf leaf = arguments->second.front();
  const c10::IValue& value = arguments_[static_cast<size_t>(leaf.argument)];
  const at::Tensor argument = leaf.item < 0
                                  ? value.toTensor()
                                  : value.toListRef()[static_cast<size_t>(leaf.item)].toTensor();
  pointer.base = Pointer::Base::Argument;
  pointer.leaf = leaf;
  pointer.offset = byte_offset(tensor) - byte_offset(argument);
  return Known{pointer, Operand::Kind::View};
}

void Recorder::learn(const at::Tensor& tensor, const Pointer& pointer, Operand::Kind kind) {
  alive_.push_back(tensor);
  known_.emplace(tensor.unsafeGetTensorImpl(), Known{pointer, kind});
}

int32_t Recorder::learn_memory(const at::Tensor& tensor, Operand::Kind kind) {
  const auto memory = static_cast<int32_t>(memories_++);
  memory_of_[storage_of(tensor)] = memory;
  Pointer pointer;
  pointer.base = Pointer::Base::Memory;
  pointer.memory = memory;
  pointer.offset = byte_offset(tensor);
  learn(tensor, pointer, kind);
  return memory;
}

// Of the op's inputs on the same memory, the first is what it is a view of.
void Recorder::learn_view(const at::Tensor& tensor) {
  if (known_.count(tensor.unsafeGetTensorImpl()) > 0) return;
  for (const Before& input : before_) {
    if (input.storage != storage_of(tensor)) continue;
    if (const auto base = find(input.tensor)) {
      Pointer pointer = base->pointer;
      pointer.offset += byte_offset(tensor) - byte_offset(input.tensor);
      learn(tensor, pointer, Operand::Kind::View);
      return;
    }
  }
  if (const auto known = find(tensor)) learn(tensor, known->pointer, Operand::Kind::View);
}

Pointer Recorder::locate(const at::Tensor& tensor) {
  if (!is_dense(tensor)) {
    refuse("a kernel got a tensor that is lazy, sparse or of a type of its own");
    return {};
  }
  if (const auto known = find(tensor)) return known->pointer;
  refuse("a kernel got the address of a tensor that is neither an argument nor allocated by the impl");
  return {};
}

Pointer Recorder::scratch(size_t nbytes) {
  Pointer pointer;
  pointer.base = Pointer::Base::Memory;
  pointer.memory = static_cast<int32_t>(memories_++);
  steps_.push_back(
      std::make_unique<Allocation>(pointer.memory, nbytes, c10::GetAllocator(device_.type())));
  return pointer;
}

// --------------------------------------------------------------------------- ops

void Recorder::begin_op(const at::RecordFunction& function) {
  try {
    const auto inputs = function.inputs();
    inputs_.assign(inputs.begin(), inputs.end());
    before_.clear();
    for (const c10::IValue& input : inputs_) {
      each_tensor(input, [this](const at::Tensor& tensor, int32_t) {
        if (!is_dense(tensor)) {
          refuse("an op got a tensor that is lazy, sparse or of a type of its own");
          return;
        }
        before_.push_back({tensor, storage_of(tensor), tensor.sizes().vec(), tensor.strides().vec(),
                           tensor.storage_offset()});
      });
    }
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void Recorder::end_op(const at::RecordFunction& function) {
  if (!refusal_.empty()) return;
  try {
    const auto name = *function.operator_name();
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const std::string text = c10::toString(name);
    if (!op) return refuse(text + " is not an op of the dispatcher");
    const size_t arguments = op->schema().arguments().size();
    const size_t returns = op->schema().returns().size();
    const auto& outputs = function.outputs();
    if (outputs.size() < returns || inputs_.size() < arguments) return refuse(text + " raised");
    // A boxed call tells the whole stack.
    inputs_.erase(inputs_.begin(), inputs_.end() - static_cast<std::ptrdiff_t>(arguments));
    record_op(*op, at::ArrayRef<c10::IValue>(outputs).slice(outputs.size() - returns));
  } catch (const std::exception& error) {
    refuse(error.what());
  }
  inputs_.clear();
  before_.clear();
}

// Whether it reads the value of a number among the arguments, which is part of the key.
bool Recorder::reads_key(const c10::OperatorHandle& op) const {
  if (!is_among(kNumbers, op.operator_name().name) || before_.size() != 1) return false;
  const auto known = known_.find(before_[0].tensor.unsafeGetTensorImpl());
  return known != known_.end() && known->second.kind == Operand::Kind::Argument &&
         before_[0].tensor.device().is_cpu() && before_[0].tensor.dim() == 0;
}

bool Recorder::check_inputs(const c10::OperatorHandle& op) {
  const std::string name = c10::toString(op.operator_name());
  if (op.operator_name().getNamespace() != c10::string_view("aten")) {
    refuse("it calls " + name + ", which is not one of PyTorch's own ops");
    return false;
  }
  if (op.operator_name().name == schema_.name() &&
      op.operator_name().overload_name == schema_.overload_name()) {
    refuse("it calls " + name + " itself, which is the native kernel inside it");
    return false;
  }
  if (reads_key(op)) return true;
  for (const auto& [tag, reason] : {
           std::pair(at::Tag::nondeterministic_seeded, ", which takes random numbers"),
           std::pair(at::Tag::data_dependent_output, ", which depends on values"),
           std::pair(at::Tag::dynamic_output_shape, ", whose shape depends on values"),
       }) {
    if (op.hasTag(tag)) {
      refuse("it calls " + name + reason);
      return false;
    }
  }
  for (const Before& input : before_) {
    if (storage_of(input.tensor) != input.storage || input.tensor.sizes() != input.sizes ||
        input.tensor.strides() != input.strides ||
        input.tensor.storage_offset() != input.offset) {
      refuse("it calls " + name + ", which changes a tensor's shape in place");
      return false;
    }
  }
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!writes(arguments[i])) continue;
    each_tensor(inputs_[i], [&](const at::Tensor& tensor, int32_t) {
      if (!may_write(tensor)) refuse("it writes to an argument, by " + name);
    });
  }
  return refusal_.empty();
}

bool Recorder::may_write(const at::Tensor& tensor) const {
  const auto known = find(tensor);
  if (!known || known->pointer.base != Pointer::Base::Argument) return true;
  return writes(schema_.arguments()[static_cast<size_t>(known->pointer.leaf.argument)]);
}

bool Recorder::record_allocation(const c10::OperatorHandle& op,
                                 at::ArrayRef<c10::IValue> outputs) {
  if (!is_among(kAllocations, op.operator_name().name) || outputs.size() != 1 ||
      !outputs[0].isTensor()) {
    return false;
  }
  const at::Tensor tensor = outputs[0].toTensor();
  if (known_.count(tensor.unsafeGetTensorImpl()) > 0) return false;  // `out=`
  if (tensor.device() != device_) {
    refuse("it allocates on " + tensor.device().str());
  } else if (!is_dense(tensor)) {
    refuse("it allocates a tensor that is not dense");
  } else {
    const auto* storage = storage_of(tensor);
    const int32_t memory = learn_memory(tensor, Operand::Kind::View);
    steps_.push_back(
        std::make_unique<Allocation>(memory, storage->nbytes(), const_cast<c10::StorageImpl*>(storage)->allocator()));
  }
  return true;
}

void Recorder::record_op(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs) {
  if (!check_inputs(op) || record_allocation(op, outputs)) return;
  const std::string name = c10::toString(op.operator_name());
  const auto& arguments = op.schema().arguments();
  const bool writes_any = std::any_of(arguments.begin(), arguments.end(), writes);
  const bool tensors = std::all_of(outputs.begin(), outputs.end(), is_tensors);
  if (!writes_any && (outputs.empty() || !tensors)) {
    if (!is_among(kMetadata, op.operator_name().name) && !reads_key(op)) {
      refuse("it calls " + name + ", which may read values");
    }
    return;
  }
  bool fresh = false;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const at::Tensor& tensor, int32_t) {
      if (!is_dense(tensor)) {
        refuse("it calls " + name + ", whose result is lazy, sparse or of a type of its own");
      } else if (tensor.device() != device_) {
        refuse("it calls " + name + ", whose result is on " + tensor.device().str());
      } else if (!find(tensor) && arguments_on_.count(storage_of(tensor)) == 0) {
        fresh = true;
      }
    });
  }
  if (!refusal_.empty()) return;
  std::vector<Operand> inputs;
  if (fresh || writes_any) {
    for (const c10::IValue& input : inputs_) {
      auto value = operand(input, name);
      if (!value) return;
      inputs.push_back(std::move(*value));
    }
  }
  std::vector<BoxedCall::Result> results;
  for (size_t index = 0; index < outputs.size(); ++index) {
    each_tensor(outputs[index], [&](const at::Tensor& tensor, int32_t item) {
      if (find(tensor) || arguments_on_.count(storage_of(tensor)) > 0) {
        learn_view(tensor);
        return;
      }
      const int32_t memory = learn_memory(tensor, Operand::Kind::Result);
      results.push_back({memory, static_cast<int32_t>(index), item, tensor.sizes().vec(),
                         tensor.strides().vec()});
    });
  }
  // Otherwise all it did was to look at memory in another way.
  if (fresh || writes_any) {
    steps_.push_back(std::make_unique<BoxedCall>(op, std::move(inputs), std::move(results)));
  }
}

// --------------------------------------------------------------------------- operands

std::optional<Operand> Recorder::operand(const at::Tensor& tensor, const std::string& user) {
  Operand result;
  if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0 &&
                            tensor.unsafeGetTensorImpl()->is_wrapped_number())) {
    if (const auto known = known_.find(tensor.unsafeGetTensorImpl()); known == known_.end()) {
      result.constant = tensor;
      return result;
    }
  }
  const auto known = find(tensor);
  if (!known) {
    refuse(user + " got a tensor that is neither an argument nor made by the impl");
    return std::nullopt;
  }
  result.kind = known->kind;
  switch (known->kind) {
    case Operand::Kind::Argument:
      result.leaf = known->pointer.leaf;
      break;
    case Operand::Kind::Result:
      result.memory = known->pointer.memory;
      break;
    default:
      result.view = std::make_unique<View>();
      result.view->pointer = known->pointer;
      result.view->dtype = tensor.scalar_type();
      result.view->sizes = tensor.sizes().vec();
      result.view->strides = tensor.strides().vec();
      result.view->contiguous =
          tensor.strides() == at::IntArrayRef(c10::contiguous_strides(tensor.sizes()));
  }
  return result;
}

std::optional<Operand> Recorder::operand(const c10::IValue& value, const std::string& user) {
  if (value.isTensor()) return operand(value.toTensor(), user);
  Operand result;
  if (is_constant(value)) {
    result.constant = value.isList() ? c10::IValue(value.toList().copy()) : value;
    return result;
  }
  if (!value.isList() || !is_tensors(value)) {
    refuse(user + " got an argument that a plan cannot hold: " + value.tagKind());
    return std::nullopt;
  }
  result.kind = Operand::Kind::List;
  result.constant = c10::impl::GenericList(value.toList().elementType());
  for (const c10::IValue& item : value.toListRef()) {
    auto each = operand(item, user);
    if (!each) return std::nullopt;
    result.items.push_back(std::move(*each));
  }
  return result;
}

std::shared_ptr<const Plan> Recorder::finish(const std::vector<c10::IValue>& results,
                                             PythonRef keep) {
  std::vector<Operand> outputs;
  for (size_t index = 0; index < results.size() && refusal_.empty(); ++index) {
    const bool aliases = schema_.returns()[index].alias_info() != nullptr;
    each_tensor(results[index], [&](const at::Tensor& tensor, int32_t) {
      const auto known = find(tensor);
      if (known && known->pointer.base == Pointer::Base::Argument && !aliases) {
        refuse("it returns an argument, or a view of one");
      } else if (!is_dense(tensor) || tensor.requires_grad()) {
        refuse("it returns a tensor that is lazy, sparse, requires grad or has a type of its own");
      }
    });
    auto output = operand(results[index], "output " + std::to_string(index));
    if (output) outputs.push_back(std::move(*output));
  }
  if (!refusal_.empty()) return nullptr;
  return std::make_shared<const Plan>(device_, std::move(steps_), std::move(outputs), memories_,
                                      watches_hooks_, std::move(keep));
}

}  // namespace opgraft
