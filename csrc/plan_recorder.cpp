#include "plan_recorder.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace opgraft {

namespace {

thread_local Recorder* current_recorder = nullptr;

constexpr std::string_view kAllocations[] = {"aten::empty", "aten::empty_like", "aten::new_empty",
                                             "aten::empty_strided", "aten::new_empty_strided"};
// Ops that return metadata, which is in a plan's key.
constexpr std::string_view kMetadata[] = {
    "aten::size",
    "aten::stride",
    "aten::numel",
    "aten::dim",
    "aten::sym_size",
    "aten::sym_stride",
    "aten::sym_numel",
    "aten::is_contiguous",
    "aten::sym_is_contiguous",
    "aten::is_same_size",
    "aten::result_type",
    "aten::can_cast",
    "aten::promote_types",
    "aten::is_floating_point",
    "aten::is_complex",
    "aten::is_signed",
};
// Ops that return a view of their first argument, and use only the metadata of the second.
constexpr std::string_view kViewsLikeAnother[] = {"aten::expand_as", "aten::view_as",
                                                  "aten::reshape_as"};
// `tolist`, `numpy` and `__array__` call these before they read values without an op. Tensors that
// these ops would change never reach an impl.
constexpr std::string_view kBeforeReading[] = {"aten::resolve_conj", "aten::resolve_neg"};

constexpr std::string_view kScalarReads[] = {"aten::item", "aten::_local_scalar_dense",
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

// The size of the memory from a tensor's first element to its last.
int64_t span_in_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  return static_cast<int64_t>(at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), static_cast<size_t>(tensor.itemsize())));
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Fake tensors have made-up addresses from here on (ready/dry.py). No other number is as large.
constexpr uint64_t kFakeAddresses = uint64_t{1} << 62;

// Visits every defined tensor of a value, also in lists.
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

// Whether a value is a tensor or a list of tensors.
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

// Marks the callbacks of ops. Other functions (autograd's, those in Python) are ignored.
struct Recorder::Context : at::ObserverContext {};

Recorder::Recorder(const c10::FunctionSchema& schema, std::vector<c10::IValue> arguments,
                   c10::Device device, Tensors tensors)
    : schema_(schema), arguments_(std::move(arguments)), device_(device), tensors_(tensors) {
  for (size_t index = 0; index < arguments_.size(); ++index) {
    each_tensor(arguments_[index], [&](const at::Tensor& tensor, int32_t item) {
      const TensorArgument argument{static_cast<int32_t>(index), item};
      if (origins_.count(tensor.unsafeGetTensorImpl()) > 0) return;  // as the key tells
      Pointer pointer;
      pointer.base = Pointer::Base::Argument;
      pointer.argument = argument;
      track(tensor, pointer, Operand::Kind::Argument);
      const bool written = writes(schema_.arguments()[index]);
      ArgumentStorage& shared =
          argument_storages_.try_emplace(storage_of(tensor), ArgumentStorage{argument})
              .first->second;
      shared.written |= written;
      if (tensor.numel() == 0) return;  // its address is null
      const int64_t begin = byte_offset(tensor);
      const int64_t end = begin + span_in_bytes(tensor);
      const bool is_first = shared.begin == shared.end;
      if (is_first) shared.first = argument;
      shared.begin = is_first ? begin : std::min(shared.begin, begin);
      shared.end = is_first ? end : std::max(shared.end, end);
    });
  }
}

Recorder::~Recorder() { stop(); }

Recorder* Recorder::current() noexcept { return current_recorder; }

void Recorder::start() {
  TORCH_CHECK(current_recorder == nullptr, "something is being recorded on this thread already");
  current_recorder = this;
  started_ = true;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            Recorder* recorder = current_recorder;
            if (recorder == nullptr || !function.operator_name()) return nullptr;
            if (recorder->depth_++ == 0) {
              recorder->begin_op(function);
            } else {
              recorder->begin_nested_op(function);
            }
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

bool Recorder::is_dense(const at::Tensor& tensor) const {
  constexpr c10::DispatchKeySet odd{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                    c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize};
  const auto keys = tensor.key_set();
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !keys.has_any(odd) &&
         (tensors_ == Tensors::Fake || !keys.has(c10::DispatchKey::Python)) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

std::optional<Recorder::Origin> Recorder::origin_of(const at::Tensor& tensor) const {
  const auto known = origins_.find(tensor.unsafeGetTensorImpl());
  if (known != origins_.end()) return known->second;
  // It was created without an op (`.data`). Its memory tells the origin.
  Pointer pointer;
  if (const auto memory = memory_of_.find(storage_of(tensor)); memory != memory_of_.end()) {
    pointer.base = Pointer::Base::Memory;
    pointer.memory = memory->second;
    pointer.offset = byte_offset(tensor);
    return Origin{pointer, Operand::Kind::View};
  }
  const auto arguments = argument_storages_.find(storage_of(tensor));
  if (arguments == argument_storages_.end()) return std::nullopt;
  // With two arguments on one storage (q and k of one qkv) the origin could be either. Both are
  // right, because their distance is in the key.
  pointer.base = Pointer::Base::Argument;
  pointer.argument = arguments->second.first;
  pointer.offset = byte_offset(tensor) - byte_offset(argument_tensor(pointer.argument));
  return Origin{pointer, Operand::Kind::View};
}

at::Tensor Recorder::argument_tensor(const TensorArgument& argument) const {
  const c10::IValue& value = arguments_[static_cast<size_t>(argument.index)];
  if (argument.item < 0) return value.toTensor();
  return value.toListRef()[static_cast<size_t>(argument.item)].toTensor();
}

bool Recorder::is_on_argument(const at::Tensor& tensor) const {
  return argument_storages_.count(storage_of(tensor)) > 0;
}

bool Recorder::is_within(const at::Tensor& tensor, const Pointer& pointer) const {
  if (pointer.base != Pointer::Base::Argument || tensor.numel() == 0) return true;
  const auto shared = argument_storages_.find(storage_of(tensor));
  if (shared == argument_storages_.end()) return false;
  const int64_t begin = byte_offset(tensor);
  return begin >= shared->second.begin && begin + span_in_bytes(tensor) <= shared->second.end;
}

void Recorder::track(const at::Tensor& tensor, const Pointer& pointer, Operand::Kind kind) {
  alive_.push_back(tensor);
  origins_.emplace(tensor.unsafeGetTensorImpl(), Origin{pointer, kind});
}

int32_t Recorder::track_memory(const at::Tensor& tensor, Operand::Kind kind) {
  const auto memory = static_cast<int32_t>(memories_++);
  memory_of_[storage_of(tensor)] = memory;
  Pointer pointer;
  pointer.base = Pointer::Base::Memory;
  pointer.memory = memory;
  pointer.offset = byte_offset(tensor);
  track(tensor, pointer, kind);
  return memory;
}

void Recorder::track_view(const at::Tensor& tensor) {
  if (const auto known = origin_of(tensor)) track(tensor, known->pointer, known->kind);
}

Pointer Recorder::locate(const at::Tensor& tensor) {
  if (!is_dense(tensor)) {
    refuse("a kernel got a tensor that is lazy, sparse or of a type of its own");
    return {};
  }
  if (tensor.numel() == 0) return {};  // null, as `data_ptr` returns
  if (const auto known = origin_of(tensor)) {
    if (is_within(tensor, known->pointer)) return known->pointer;
    refuse("a kernel got memory beyond the arguments on its storage");
    return {};
  }
  refuse(
      "a kernel got the address of a tensor that is neither an argument nor allocated by the impl");
  return {};
}

void Recorder::check_number(uint64_t number) {
  const bool is_fake_address =
      tensors_ == Tensors::Fake && number >= kFakeAddresses && number < 2 * kFakeAddresses;
  if (is_fake_address) return refuse("a kernel got an address as an integer, not as a tensor");
  if (tensors_ == Tensors::Fake) return;
  for (const at::Tensor& tensor : alive_) {
    const auto* storage = storage_of(tensor);
    if (storage == nullptr || storage->nbytes() == 0) continue;
    const auto begin = reinterpret_cast<uint64_t>(storage->data());
    if (number < begin || number >= begin + storage->nbytes()) continue;
    return refuse("a kernel got an address as an integer, not as a tensor");
  }
}

Pointer Recorder::scratch(size_t nbytes) {
  Pointer pointer;
  pointer.base = Pointer::Base::Memory;
  pointer.memory = static_cast<int32_t>(memories_++);
  auto* allocator = tensors_ == Tensors::Fake ? nullptr : c10::GetAllocator(device_.type());
  steps_.push_back(std::make_unique<Allocation>(pointer.memory, nbytes, allocator));
  return pointer;
}

// --------------------------------------------------------------------------- ops

// `torch.empty` and the like detach what they made, outside of any op. For a fake tensor that
// detaches what it is made of, and may call other ops, which no mode sees. The result has the same
// memory, by which it is known.
bool Recorder::is_inside_fake_tensor() const {
  return tensors_ == Tensors::Fake &&
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
}

void Recorder::begin_op(const at::RecordFunction& function) {
  if (is_inside_fake_tensor()) return;
  try {
    const auto inputs = function.inputs();
    inputs_.assign(inputs.begin(), inputs.end());
    inputs_before_.clear();
    nested_reads_value_ = nested_has_dynamic_shape_ = false;
    for (const c10::IValue& input : inputs_) {
      each_tensor(input, [this](const at::Tensor& tensor, int32_t) {
        if (!is_dense(tensor)) {
          refuse("an op got a tensor that is lazy, sparse or of a type of its own");
          return;
        }
        inputs_before_.push_back({tensor, storage_of(tensor), tensor.sizes().vec(),
                                  tensor.strides().vec(), tensor.storage_offset()});
      });
    }
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void Recorder::begin_nested_op(const at::RecordFunction& function) {
  const auto op = c10::Dispatcher::singleton().findOp(*function.operator_name());
  if (!op) return;
  nested_reads_value_ |= op->hasTag(at::Tag::data_dependent_output);
  nested_has_dynamic_shape_ |= op->hasTag(at::Tag::dynamic_output_shape);
}

void Recorder::end_op(const at::RecordFunction& function) {
  if (!refusal_.empty() || is_inside_fake_tensor()) return;
  try {
    const auto name = *function.operator_name();
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const std::string text = c10::toString(name);
    if (!op) return refuse(text + " is not an op of the dispatcher");
    const size_t arguments = op->schema().arguments().size();
    const size_t returns = op->schema().returns().size();
    const auto& outputs = function.outputs();
    if (outputs.size() < returns || inputs_.size() < arguments) return refuse(text + " raised");
    // For a boxed call the inputs are the whole stack.
    inputs_.erase(inputs_.begin(), inputs_.end() - static_cast<std::ptrdiff_t>(arguments));
    record_op(*op, at::ArrayRef<c10::IValue>(outputs).slice(outputs.size() - returns));
  } catch (const std::exception& error) {
    refuse(error.what());
  }
  inputs_.clear();
  inputs_before_.clear();
}

// Whether an op reads the value of a number among the arguments, which is in the key.
bool Recorder::reads_key(const c10::OperatorHandle& op) const {
  if (!is_among(kScalarReads, op.operator_name().name) || inputs_before_.size() != 1) return false;
  const at::Tensor& tensor = inputs_before_[0].tensor;
  const auto known = origins_.find(tensor.unsafeGetTensorImpl());
  if (known == origins_.end() || known->second.kind != Operand::Kind::Argument ||
      !tensor.device().is_cpu() || tensor.dim() != 0) {
    return false;
  }
  // If anything was recorded, the impl may have written to it.
  const auto shared = argument_storages_.find(storage_of(tensor));
  return steps_.empty() || (shared != argument_storages_.end() && !shared->second.written);
}

// Whether an op's result is a number on the CPU that it made of no tensor. Some ops return such
// ones: the seeds of a dropout that is not there.
bool Recorder::is_number(const at::Tensor& tensor) const {
  return tensor.device().is_cpu() && tensor.dim() == 0 && inputs_before_.empty();
}

// Whether an op made a view whose position or shape depends on a value. A plan does not call such
// an op again, because it only makes a view.
bool Recorder::reads_values(const c10::OperatorHandle& op,
                            at::ArrayRef<c10::IValue> outputs) const {
  bool is_view = false;
  std::vector<const c10::StorageImpl*> viewed;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const at::Tensor& tensor, int32_t) {
      viewed.push_back(storage_of(tensor));
      is_view |= origins_.count(tensor.unsafeGetTensorImpl()) == 0 && origin_of(tensor).has_value();
    });
  }
  if (!is_view) return false;
  if (nested_reads_value_) return true;
  if (is_among(kViewsLikeAnother, op.operator_name().name)) return false;
  // `tensor_split` reads its indices without calling an op.
  return std::any_of(
      inputs_before_.begin(), inputs_before_.end(), [&viewed](const InputState& input) {
        return input.tensor.device().is_cpu() &&
               c10::isIntegralType(input.tensor.scalar_type(), /*includeBool=*/true) &&
               std::find(viewed.begin(), viewed.end(), input.storage) == viewed.end();
      });
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
  if (is_among(kBeforeReading, op.operator_name().name)) {
    refuse("it reads a tensor's values, by tolist, numpy or the like (" + name + ")");
    return false;
  }
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
  for (const InputState& input : inputs_before_) {
    if (storage_of(input.tensor) != input.storage || input.tensor.sizes() != input.sizes ||
        input.tensor.strides() != input.strides || input.tensor.storage_offset() != input.offset) {
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
  const auto known = origin_of(tensor);
  if (!known || known->pointer.base != Pointer::Base::Argument) return true;
  return writes(schema_.arguments()[static_cast<size_t>(known->pointer.argument.index)]);
}

bool Recorder::record_allocation(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs) {
  if (!is_among(kAllocations, op.operator_name().name) || outputs.size() != 1 ||
      !outputs[0].isTensor()) {
    return false;
  }
  const at::Tensor tensor = outputs[0].toTensor();
  if (origins_.count(tensor.unsafeGetTensorImpl()) > 0) return false;  // `out=`
  // `torch.tensor` and the like exclude dispatch modes while they create and fill a tensor without
  // an op.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    refuse("it makes a tensor of numbers in Python; torch.full makes one that a plan can hold");
  } else if (tensor.device() != device_) {
    refuse("it allocates on " + tensor.device().str());
  } else if (!is_dense(tensor)) {
    refuse("it allocates a tensor that is not dense");
  } else {
    const auto* storage = storage_of(tensor);
    const int32_t memory = track_memory(tensor, Operand::Kind::View);
    steps_.push_back(std::make_unique<Allocation>(
        memory, storage->nbytes(), const_cast<c10::StorageImpl*>(storage)->allocator()));
  }
  return true;
}

void Recorder::record_op(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> outputs) {
  if (tensors_ == Tensors::Fake && op.operator_name().name == "aten::detach") return;
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
  if (reads_values(op, outputs)) {
    refuse("it calls " + name + ", which reads a value to make a view");
    return;
  }
  bool has_new_output = false;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const at::Tensor& tensor, int32_t) {
      if (!is_dense(tensor)) {
        refuse("it calls " + name + ", whose result is lazy, sparse or of a type of its own");
      } else if (tensor.device() != device_ && !is_number(tensor)) {
        refuse("it calls " + name + ", whose result is on " + tensor.device().str());
      } else if (!origin_of(tensor)) {
        has_new_output = true;
      }
    });
  }
  if (has_new_output && nested_has_dynamic_shape_) {
    refuse("it calls " + name + ", whose shape depends on values");
  }
  if (!refusal_.empty()) return;
  std::vector<Operand> inputs;
  if (has_new_output || writes_any) {
    for (const c10::IValue& input : inputs_) {
      auto value = operand(input, name);
      if (!value) return;
      inputs.push_back(std::move(*value));
    }
  }
  std::vector<BoxedCall::Result> results;
  std::unordered_set<int32_t> made;
  for (size_t index = 0; index < outputs.size(); ++index) {
    each_tensor(outputs[index], [&](const at::Tensor& tensor, int32_t item) {
      const auto known = origin_of(tensor);
      // If two results are on one new memory, the second is a view of the first. A replay checks
      // that.
      const bool is_made = !known || made.count(known->pointer.memory) > 0;
      int32_t memory = -1;
      if (known) {
        track_view(tensor);
      } else {
        memory = track_memory(tensor, Operand::Kind::Result);
        made.insert(memory);
      }
      if (!is_made) return;
      results.push_back({memory, static_cast<int32_t>(index), item, tensor.scalar_type(),
                         tensor.device(), tensor.storage_offset(), tensor.sizes().vec(),
                         tensor.strides().vec()});
    });
  }
  // Otherwise it only made views.
  if (has_new_output || writes_any) {
    steps_.push_back(std::make_unique<BoxedCall>(op, std::move(inputs), std::move(results)));
  }
}

// --------------------------------------------------------------------------- operands

std::optional<Operand> Recorder::operand(const at::Tensor& tensor, const std::string& consumer) {
  Operand result;
  if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0 &&
                            tensor.unsafeGetTensorImpl()->is_wrapped_number())) {
    if (const auto known = origins_.find(tensor.unsafeGetTensorImpl()); known == origins_.end()) {
      result.constant = tensor;
      return result;
    }
  }
  const auto known = origin_of(tensor);
  if (!known) {
    refuse(consumer + " got a tensor that is neither an argument nor made by the impl");
    return std::nullopt;
  }
  if (!is_within(tensor, known->pointer)) {
    refuse(consumer + " got memory beyond the arguments on its storage");
    return std::nullopt;
  }
  result.kind = known->kind;
  switch (known->kind) {
    case Operand::Kind::Argument:
      result.argument = known->pointer.argument;
      break;
    case Operand::Kind::Result:
      result.memory = known->pointer.memory;
      break;
    default:
      result.view = std::make_unique<View>();
      result.view->pointer = known->pointer;
      // There need not be memory at the offset of an empty tensor.
      if (tensor.numel() == 0) result.view->pointer.offset = 0;
      result.view->dtype = tensor.scalar_type();
      result.view->sizes = tensor.sizes().vec();
      result.view->strides = tensor.strides().vec();
      result.view->contiguous =
          tensor.strides() == at::IntArrayRef(c10::contiguous_strides(tensor.sizes()));
  }
  return result;
}

std::optional<Operand> Recorder::operand(const c10::IValue& value, const std::string& consumer) {
  if (value.isTensor()) return operand(value.toTensor(), consumer);
  Operand result;
  if (is_constant(value)) {
    result.constant = value.isList() ? c10::IValue(value.toList().copy()) : value;
    return result;
  }
  if (!value.isList() || !is_tensors(value)) {
    refuse(consumer + " got an argument that a plan cannot hold: " + value.tagKind());
    return std::nullopt;
  }
  result.kind = Operand::Kind::List;
  result.constant = c10::impl::GenericList(value.toList().elementType());
  for (const c10::IValue& item : value.toListRef()) {
    auto each = operand(item, consumer);
    if (!each) return std::nullopt;
    result.items.push_back(std::move(*each));
  }
  return result;
}

std::shared_ptr<const Plan> Recorder::finish(const std::vector<c10::IValue>& results,
                                             PythonRef keep_alive) {
  std::vector<Operand> outputs;
  for (size_t index = 0; index < results.size() && refusal_.empty(); ++index) {
    const bool aliases = schema_.returns()[index].alias_info() != nullptr;
    each_tensor(results[index], [&](const at::Tensor& tensor, int32_t) {
      const auto known = origin_of(tensor);
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
                                      watches_hooks_, std::move(keep_alive));
}

}  // namespace opgraft
