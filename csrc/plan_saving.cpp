#include "plan_saving.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/util/strides.h>

#include <cstring>
#include <utility>

#include "plan_steps.h"
#include "torch_python.h"

namespace opgraft {

// --------------------------------------------------------------------------- saving

namespace {

template <class... Values>
py::list list_of(const Values&... values) {
  py::list list;
  (list.append(values), ...);
  return list;
}

py::list list_of_numbers(const std::vector<int64_t>& numbers) {
  py::list list;
  for (const int64_t number : numbers) list.append(number);
  return list;
}

py::object saved(const Pointer& pointer) {
  switch (pointer.base) {
    case Pointer::Base::Null:
      break;
    case Pointer::Base::Argument:
      return list_of("argument", pointer.argument.index, pointer.argument.item, pointer.offset);
    case Pointer::Base::Memory:
      return list_of("memory", pointer.memory, pointer.offset);
  }
  return py::none();
}

py::object saved(const c10::IValue& constant);

py::object saved_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::dict(py::arg("tensor") = py::none());
  // A number that an op gets as a tensor.
  return py::dict(py::arg("number") = saved(c10::IValue(tensor.item())),
                  py::arg("dtype") = static_cast<int>(tensor.scalar_type()));
}

// What JSON lacks is a dictionary.
py::object saved(const c10::IValue& constant) {
  if (constant.isTensor()) return saved_tensor(constant.toTensor());
  if (constant.isDevice()) {
    return py::dict(py::arg("device") = c10::DeviceTypeName(constant.toDevice().type(), true));
  }
  if (constant.isComplexDouble()) {
    const auto value = constant.toComplexDouble();
    return py::dict(py::arg("complex") = list_of(value.real(), value.imag()));
  }
  if (constant.isList()) {
    py::list items;
    for (const c10::IValue& item : constant.toListRef()) items.append(saved(item));
    return std::move(items);
  }
  if (constant.isNone() || constant.isBool() || constant.isInt() || constant.isDouble() ||
      constant.isString()) {
    return torch::jit::toPyObject(constant);
  }
  throw SavingError("it holds a constant that cannot be written: " + constant.tagKind());
}

py::object saved(const Operand& operand) {
  switch (operand.kind) {
    case Operand::Kind::Constant:
      return list_of("constant", saved(operand.constant));
    case Operand::Kind::Argument:
      return list_of("argument", operand.argument.index, operand.argument.item);
    case Operand::Kind::Result:
      return list_of("result", operand.memory);
    case Operand::Kind::View:
      return list_of("view", saved(operand.view->pointer), static_cast<int>(operand.view->dtype),
                     list_of_numbers(operand.view->sizes), list_of_numbers(operand.view->strides));
    case Operand::Kind::List:
      break;
  }
  py::list items;
  for (const Operand& item : operand.items) items.append(saved(item));
  return list_of("list", items);
}

}  // namespace

py::object Allocation::saved() const { return list_of("allocate", memory_, nbytes_); }

py::list Parameters::saved() const {
  if (!maps_.empty()) throw SavingError("a kernel gets a tensor map, which holds an address");
  py::list list;
  for (const uint64_t slot : slots_) list.append(list_of("value", slot));
  for (const Patch& patch : pointers_) {
    list[patch.slot] = list_of("pointer", opgraft::saved(patch.pointer));
  }
  return list;
}

py::object CudaLaunch::saved() const {
  return list_of("launch", reinterpret_cast<uint64_t>(function_),
                 list_of(shape_.grid[0], shape_.grid[1], shape_.grid[2]), shape_.threads,
                 shape_.shared, shape_.cluster, shape_.cooperative, shape_.dependent,
                 parameters_.saved(), name_);
}

py::object FunctionCall::saved() const {
  throw SavingError("it calls a C function by its address: " + name_);
}

namespace {

void check_number(int32_t type_index) {
  if (type_index < 0 || type_index > ffi::kDevice || type_index == ffi::kOpaquePtr) {
    throw SavingError("a kernel gets an argument that is no number");
  }
}

}  // namespace

py::object FfiCall::saved() const {
  py::list arguments;
  for (const Argument& argument : arguments_) {
    if (argument.is_stream) {
      arguments.append(list_of("stream"));
    } else if (argument.is_tensor) {
      const auto& dtype = argument.tensor.dtype;
      arguments.append(list_of("tensor", opgraft::saved(argument.pointer),
                               list_of(dtype.code, dtype.bits, dtype.lanes),
                               list_of_numbers(argument.shape), list_of_numbers(argument.strides)));
    } else {
      check_number(argument.value.type_index);
      arguments.append(list_of("value", argument.value.type_index,
                               static_cast<uint64_t>(argument.value.integer)));
    }
  }
  return list_of("ffi", reinterpret_cast<uint64_t>(handle_), arguments);
}

py::object BoxedCall::saved() const {
  py::list inputs;
  for (const Operand& input : inputs_) inputs.append(opgraft::saved(input));
  py::list results;
  for (const Result& each : results_) {
    results.append(list_of(each.memory, each.output, each.item, static_cast<int>(each.dtype),
                           c10::DeviceTypeName(each.device.type(), true), each.offset,
                           list_of_numbers(each.sizes), list_of_numbers(each.strides)));
  }
  const auto& name = op_.operator_name();
  return list_of("op", name.name, name.overload_name, inputs, results);
}

py::dict saved_plan(const Plan& plan) {
  py::list steps;
  for (const auto& each : plan.steps_) steps.append(each.step->saved());
  py::list outputs;
  for (const Operand& output : plan.outputs_) outputs.append(saved(output));
  return py::dict(py::arg("memories") = plan.memories_, py::arg("hooks") = plan.watches_hooks_,
                  py::arg("steps") = steps, py::arg("outputs") = outputs);
}

// --------------------------------------------------------------------------- loading

namespace {

// Reads a saved plan. It looks at every number that would be an index: what is no plan is an error.
class PlanReader {
 public:
  PlanReader(const c10::FunctionSchema& schema, std::vector<uint64_t> functions, c10::Device device,
             size_t memories)
      : schema_(schema), functions_(std::move(functions)), device_(device), memories_(memories) {}

  std::unique_ptr<Step> step(const py::sequence& saved) const {
    const auto kind = saved[0].cast<std::string>();
    if (kind == "allocate") {
      return std::make_unique<Allocation>(memory(saved[1]), saved[2].cast<size_t>(),
                                          c10::GetAllocator(device_.type()));
    }
    if (kind == "launch") return launch(saved);
    if (kind == "ffi") return ffi_call(saved);
    if (kind == "op") return op(saved);
    throw SavingError("there is no step of the kind " + kind);
  }

  Operand operand(const py::sequence& saved, const c10::TypePtr& type) const {
    const auto kind = saved[0].cast<std::string>();
    Operand result;
    if (kind == "constant") {
      result.constant = constant(py::object(saved[1]), type);
    } else if (kind == "argument") {
      result.kind = Operand::Kind::Argument;
      result.argument = argument(saved[1], saved[2]);
    } else if (kind == "result") {
      result.kind = Operand::Kind::Result;
      result.memory = memory(saved[1]);
    } else if (kind == "view") {
      result.kind = Operand::Kind::View;
      result.view = std::make_unique<View>(view(saved));
    } else if (kind == "list") {
      const auto element = element_of(type);
      result.kind = Operand::Kind::List;
      result.constant = c10::impl::GenericList(element);
      for (const auto item : saved[1].cast<py::list>()) {
        result.items.push_back(operand(py::reinterpret_borrow<py::sequence>(item), element));
      }
    } else {
      throw SavingError("there is no operand of the kind " + kind);
    }
    return result;
  }

 private:
  static c10::TypePtr element_of(const c10::TypePtr& type) {
    const auto optional = type->cast<c10::OptionalType>();
    const auto list = (optional ? optional->getElementType() : type)->cast<c10::ListType>();
    if (!list) throw SavingError("an argument that is no list got one");
    return list->getElementType();
  }

  static c10::ScalarType dtype(py::handle saved) {
    const auto number = saved.cast<int>();
    if (number < 0 || number >= static_cast<int>(c10::ScalarType::Undefined)) {
      throw SavingError("there is no dtype " + std::to_string(number));
    }
    return static_cast<c10::ScalarType>(number);
  }

  c10::Device device(py::handle saved) const {
    const c10::Device named(saved.cast<std::string>());
    return named.type() == device_.type() ? device_ : named;
  }

  int32_t memory(py::handle saved) const {
    const auto index = saved.cast<int32_t>();
    if (index < 0 || static_cast<size_t>(index) >= memories_) {
      throw SavingError("there is no memory " + std::to_string(index));
    }
    return index;
  }

  TensorArgument argument(py::handle index, py::handle item) const {
    const TensorArgument result{index.cast<int32_t>(), item.cast<int32_t>()};
    if (result.index < 0 || static_cast<size_t>(result.index) >= schema_.arguments().size() ||
        result.item < -1) {
      throw SavingError("the op has no argument " + std::to_string(result.index));
    }
    return result;
  }

  Pointer pointer(py::handle saved) const {
    Pointer result;
    if (saved.is_none()) return result;
    const auto fields = py::reinterpret_borrow<py::sequence>(saved);
    if (fields[0].cast<std::string>() == "argument") {
      result.base = Pointer::Base::Argument;
      result.argument = argument(fields[1], fields[2]);
      result.offset = fields[3].cast<int64_t>();
    } else {
      result.base = Pointer::Base::Memory;
      result.memory = memory(fields[1]);
      result.offset = fields[2].cast<int64_t>();
    }
    return result;
  }

  View view(const py::sequence& saved) const {
    View result;
    result.pointer = pointer(saved[1]);
    result.dtype = dtype(saved[2]);
    result.sizes = saved[3].cast<std::vector<int64_t>>();
    result.strides = saved[4].cast<std::vector<int64_t>>();
    if (result.sizes.size() != result.strides.size()) {
      throw SavingError("a view has other numbers of sizes and strides");
    }
    const auto contiguous = c10::contiguous_strides(result.sizes);
    result.contiguous = c10::IntArrayRef(result.strides) == c10::IntArrayRef(contiguous);
    return result;
  }

  c10::IValue constant(const py::object& saved, const c10::TypePtr& type) const {
    if (!py::isinstance<py::dict>(saved)) return torch::jit::toIValue(saved, type);
    const auto fields = saved.cast<py::dict>();
    if (fields.contains("device")) return device(fields["device"]);
    if (fields.contains("complex")) {
      const auto parts = fields["complex"].cast<std::pair<double, double>>();
      return c10::complex<double>(parts.first, parts.second);
    }
    if (fields.contains("number")) {
      const auto number = constant(fields["number"], c10::NumberType::get());
      auto tensor = at::scalar_tensor(number.toScalar(), dtype(fields["dtype"]));
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
      return tensor;
    }
    return at::Tensor();
  }

  uint64_t function(py::handle saved) const {
    const auto number = saved.cast<uint64_t>();
    if (number >= functions_.size()) {
      throw SavingError("there is no function " + std::to_string(number));
    }
    return functions_[number];
  }

  std::unique_ptr<Step> launch(const py::sequence& saved) const {
    CudaLaunchShape shape;
    shape.grid = saved[2].cast<std::array<uint32_t, 3>>();
    shape.threads = saved[3].cast<uint32_t>();
    shape.shared = saved[4].cast<uint32_t>();
    shape.cluster = saved[5].cast<uint32_t>();
    shape.cooperative = saved[6].cast<bool>();
    shape.dependent = saved[7].cast<bool>();
    Parameters parameters;
    for (const auto each : saved[8].cast<py::list>()) {
      const auto parameter = py::reinterpret_borrow<py::sequence>(each);
      if (parameter[0].cast<std::string>() == "pointer") {
        parameters.add_pointer(pointer(parameter[1]));
      } else {
        parameters.add_value(parameter[1].cast<uint64_t>());
      }
    }
    return std::make_unique<CudaLaunch>(function(saved[1]), shape, std::move(parameters),
                                        saved[9].cast<std::string>());
  }

  std::unique_ptr<Step> ffi_call(const py::sequence& saved) const {
    std::vector<FfiCall::Argument> arguments;
    for (const auto each : saved[2].cast<py::list>()) {
      const auto fields = py::reinterpret_borrow<py::sequence>(each);
      const auto kind = fields[0].cast<std::string>();
      FfiCall::Argument argument;
      if (kind == "stream") {
        argument.is_stream = true;
        argument.value.type_index = ffi::kOpaquePtr;
      } else if (kind == "tensor") {
        argument.is_tensor = true;
        argument.pointer = pointer(fields[1]);
        const auto dtype = fields[2].cast<std::tuple<uint8_t, uint8_t, uint16_t>>();
        argument.shape = fields[3].cast<std::vector<int64_t>>();
        argument.strides = fields[4].cast<std::vector<int64_t>>();
        argument.tensor = ffi::tensor_on(device_, dtype, argument.shape.size());
      } else {
        argument.value.type_index = fields[1].cast<int32_t>();
        argument.value.integer = static_cast<int64_t>(fields[2].cast<uint64_t>());
        check_number(argument.value.type_index);
      }
      arguments.push_back(std::move(argument));
    }
    return std::make_unique<FfiCall>(function(saved[1]), std::move(arguments),
                                     FfiCall::Callee::Function);
  }

  std::unique_ptr<Step> op(const py::sequence& saved) const {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        saved[1].cast<std::string>().c_str(), saved[2].cast<std::string>().c_str());
    const auto& arguments = op.schema().arguments();
    const auto inputs = saved[3].cast<py::list>();
    if (inputs.size() != arguments.size()) throw SavingError("an op has other arguments");
    std::vector<Operand> operands;
    for (size_t i = 0; i < arguments.size(); ++i) {
      operands.push_back(operand(inputs[i].cast<py::sequence>(), arguments[i].real_type()));
    }
    std::vector<BoxedCall::Result> results;
    for (const auto each : saved[4].cast<py::list>()) {
      const auto fields = py::reinterpret_borrow<py::sequence>(each);
      const bool is_view = fields[0].cast<int32_t>() == -1;
      const auto output = fields[1].cast<int32_t>();
      if (output < 0 || static_cast<size_t>(output) >= op.schema().returns().size()) {
        throw SavingError("an op has other outputs");
      }
      results.push_back({is_view ? -1 : memory(fields[0]), output, fields[2].cast<int32_t>(),
                         dtype(fields[3]), device(fields[4]), fields[5].cast<int64_t>(),
                         fields[6].cast<std::vector<int64_t>>(),
                         fields[7].cast<std::vector<int64_t>>()});
    }
    return std::make_unique<BoxedCall>(op, std::move(operands), std::move(results));
  }

  const c10::FunctionSchema& schema_;
  std::vector<uint64_t> functions_;
  c10::Device device_;
  size_t memories_;
};

}  // namespace

std::shared_ptr<Plan> load_plan(const c10::FunctionSchema& schema, const py::dict& saved,
                                std::vector<uint64_t> functions, c10::Device device,
                                py::object keep_alive) {
  const auto memories = saved["memories"].cast<size_t>();
  const auto saved_steps = saved["steps"].cast<py::list>();
  const auto saved_outputs = saved["outputs"].cast<py::list>();
  if (memories > 4096 || saved_outputs.size() != schema.returns().size()) {
    throw SavingError("it is no plan of " + schema.name());
  }
  const PlanReader reader(schema, std::move(functions), device, memories);
  std::vector<std::unique_ptr<Step>> steps;
  for (const auto each : saved_steps) {
    steps.push_back(reader.step(py::reinterpret_borrow<py::sequence>(each)));
  }
  std::vector<Operand> outputs;
  for (size_t i = 0; i < saved_outputs.size(); ++i) {
    outputs.push_back(
        reader.operand(saved_outputs[i].cast<py::sequence>(), schema.returns()[i].real_type()));
  }
  return std::make_shared<Plan>(device, std::move(steps), std::move(outputs), memories,
                                saved["hooks"].cast<bool>(), PythonRef(std::move(keep_alive)));
}

}  // namespace opgraft
