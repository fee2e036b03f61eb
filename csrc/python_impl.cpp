#include "python_impl.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/hash.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <limits>
#include <utility>

#include "torch_function.h"
#include "torch_private.h"
#include "torch_python.h"

namespace opgraft {

namespace {

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// --------------------------------------------------------------------------- keys of a call

// Mixes the bits of a key, so that each depends on all of its parts. Tables drop the lowest bit,
// which may be the only one in which two calls differ.
uint64_t mix_bits(uint64_t hash) {
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdULL;
  return hash ^ (hash >> 33);
}

constexpr uint64_t kDifferentiated = 0x9e3779b97f4a7c15ULL;

// Of a tensor the kind has dtype, rank and layout class, not sizes.
uint64_t kind_of(const c10::TensorImpl& tensor) {
  const auto layout = tensor.is_contiguous() ? 1
                      : tensor.dim() == 4 && tensor.is_contiguous(c10::MemoryFormat::ChannelsLast)
                          ? 2
                          : 3;
  return c10::get_hash(static_cast<int>(c10::typeMetaToScalarType(tensor.dtype())), tensor.dim(),
                       layout);
}

// Of an argument that is no tensor the kind has the value if it selects a behaviour. `kind_of` in
// router/call_keys.py is the same. `max_choice`: the largest such integer.
uint64_t kind_of(const c10::IValue& value, int64_t max_choice) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? kind_of(*value.unsafeToTensorImpl()) : 7;
  }
  if (value.isNone()) return 8;
  if (value.isBool()) return value.toBool() ? 9 : 10;
  if (value.isInt()) {
    const int64_t number = value.toInt();
    return -max_choice <= number && number <= max_choice ? c10::get_hash(11, number) : 12;
  }
  if (value.isDouble()) return 13;
  if (value.isString()) return c10::get_hash(14, value.toStringRef());
  if (value.isDevice()) return c10::get_hash(15, value.toDevice());
  if (value.isList()) {
    // Of a list of sizes only the length counts, so that sizes do not multiply the kinds.
    uint64_t hash = value.toListRef().size();
    for (const auto& item : value.toListRef()) {
      if (item.isDouble() || (item.isInt() && max_choice < 0)) continue;
      hash = c10::hash_combine(hash, kind_of(item, max_choice));
    }
    return hash;
  }
  return std::hash<std::string>{}(value.tagKind());
}

// The ops inside a native kernel may go through autocast, although an impl does not.
uint64_t autocast_state() {
  const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
  const auto on = c10::autocast_dispatch_keyset - off;
  if (C10_LIKELY(on.empty())) return 0;
  uint64_t hash = on.raw_repr();
  for (const auto device : {at::kCPU, at::kCUDA, at::kXPU}) {
    hash = c10::hash_combine(hash, static_cast<size_t>(at::autocast::get_autocast_dtype(device)));
  }
  return hash;
}

uint64_t kind_of(const Call& call, const PythonConverter& converter) {
  uint64_t hash = autocast_state();
  for (size_t i = 0; i < call.argument_count; ++i) {
    hash = c10::hash_combine(hash, kind_of(call.begin()[i], converter.max_choice(i)));
  }
  return mix_bits(hash);
}

// All that a compiled kernel can be specialised on.
uint64_t exact_key(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const auto& tensor = *value.unsafeToTensorImpl();
    uint64_t hash = c10::get_hash(static_cast<int>(c10::typeMetaToScalarType(tensor.dtype())),
                                  tensor.device(), first_address(tensor) % 16);
    for (const auto size : tensor.sizes()) hash = c10::hash_combine(hash, c10::get_hash(size));
    for (const auto stride : tensor.strides())
      hash = c10::hash_combine(hash, c10::get_hash(stride));
    return hash;
  }
  if (value.isInt()) return c10::get_hash(1, value.toInt());
  if (value.isDouble()) return c10::get_hash(2, value.toDouble());
  if (value.isBool()) return c10::get_hash(3, value.toBool());
  if (value.isNone()) return 4;
  if (value.isString()) return c10::get_hash(5, value.toStringRef());
  if (value.isList()) {
    uint64_t hash = value.toListRef().size();
    for (const auto& item : value.toListRef()) hash = c10::hash_combine(hash, exact_key(item));
    return hash;
  }
  return std::hash<std::string>{}(value.tagKind());
}

uint64_t exact_key(const Call& call) {
  uint64_t hash = 0;
  for (const auto* value = call.begin(); value != call.end(); ++value) {
    hash = c10::hash_combine(hash, exact_key(*value));
  }
  return mix_bits(hash);
}

}  // namespace

// --------------------------------------------------------------------------- PythonConverter

namespace {

// Integers that cannot be symbolic select a behaviour (`dim`). Small ones are part of the kind. So
// are dtypes, layouts and memory formats, which are integers here, whatever their value.
constexpr int64_t kMaxChoice = 16;

int64_t max_choice_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::IntType:
      return kMaxChoice;
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return std::numeric_limits<int64_t>::max();
    default:
      return -1;
  }
}

}  // namespace

PythonConverter::PythonConverter(const c10::FunctionSchema& schema) : schema_(schema) {
  std::vector<std::string> names;
  for (const auto& argument : schema.arguments()) {
    auto type = argument.real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    const auto list = type->cast<c10::ListType>();
    max_choices_.push_back(max_choice_of(list ? *list->getElementType() : *type));
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        kinds_.push_back(Kind::Tensor);
        break;
      case c10::TypeKind::ScalarTypeType:
        kinds_.push_back(Kind::ScalarType);
        break;
      case c10::TypeKind::LayoutType:
        kinds_.push_back(Kind::Layout);
        break;
      case c10::TypeKind::MemoryFormatType:
        kinds_.push_back(Kind::MemoryFormat);
        break;
      default: {
        const bool tensors = list && (list->getElementType()->kind() == c10::TypeKind::TensorType ||
                                      *list->getElementType() == *c10::OptionalType::ofTensor());
        kinds_.push_back(tensors ? Kind::TensorList : Kind::Other);
      }
    }
    if (argument.kwarg_only()) {
      names.push_back(argument.name());
    } else {
      ++positional_;
    }
  }
  if (names.empty()) return;
  py::tuple interned(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    interned[i] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(names[i].c_str()));
  }
  keyword_names_ = PythonRef(std::move(interned));
}

py::object PythonConverter::to_python(size_t argument, const c10::IValue& value) const {
  if (value.isNone()) return py::none();
  switch (kinds_[argument]) {
    case Kind::Tensor:
      // Not `toPyObject`, which unwraps wrapped numbers.
      return wrap(value.toTensor());
    case Kind::TensorList: {
      const auto items = value.toListRef();
      py::list list(items.size());
      for (size_t i = 0; i < items.size(); ++i) {
        list[i] = items[i].isNone() ? py::none() : wrap(items[i].toTensor());
      }
      return std::move(list);
    }
    case Kind::ScalarType:
      return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
          torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
    case Kind::Layout:
      return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
          torch::getTHPLayout(static_cast<c10::Layout>(value.toInt()))));
    case Kind::MemoryFormat:
      return py::reinterpret_borrow<py::object>(
          torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt())));
    case Kind::Other:
      break;
  }
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isDouble()) return py::float_(value.toDouble());
  return torch::jit::toPyObject(value);
}

py::tuple PythonConverter::to_python(const c10::IValue* arguments) const {
  py::tuple values(kinds_.size());
  for (size_t i = 0; i < kinds_.size(); ++i) values[i] = to_python(i, arguments[i]);
  return values;
}

std::vector<c10::IValue> PythonConverter::to_results(py::handle result,
                                                     const std::string& who) const {
  const auto& returns = schema_.returns();
  const auto convert = [&](py::handle value, const c10::TypePtr& type) -> c10::IValue {
    if (type->kind() != c10::TypeKind::TensorType) return torch::jit::toIValue(value, type);
    // One of several outputs may be None: a gradient that is not needed.
    if (value.is_none() && returns.size() > 1) return at::Tensor();
    py::detail::make_caster<at::Tensor> tensor;
    if (tensor.load(value, /*convert=*/false)) {
      return py::detail::cast_op<at::Tensor&&>(std::move(tensor));
    }
    const auto type_name = py::type::of(value).attr("__name__").cast<std::string>();
    throw py::type_error(who + " returned output 0 with " + (value.is_none() ? "None" : type_name) +
                         " instead of a tensor");
  };
  std::vector<c10::IValue> results;
  results.reserve(returns.size());
  if (returns.size() == 1) {
    results.push_back(convert(result, returns[0].type()));
  } else if (!returns.empty()) {
    const bool sequence = PyTuple_Check(result.ptr()) || PyList_Check(result.ptr());
    const auto size = sequence ? py::len(result) : 0;
    if (size != returns.size()) {
      throw py::type_error(who + " returned " +
                           (sequence ? std::to_string(size) + " values" : "no tuple") +
                           "; the op has " + std::to_string(returns.size()) + " outputs");
    }
    for (size_t i = 0; i < size; ++i) {
      results.push_back(convert(py::object(result[py::int_(i)]), returns[i].type()));
    }
  }
  return results;
}

py::object PythonConverter::pop_results(torch::jit::Stack& stack) const {
  const auto& returns = schema_.returns();
  const auto convert = [](const c10::IValue& value) -> py::object {
    if (value.isTensor()) {
      if (!value.toTensor().defined()) return py::none();
      return wrap(value.toTensor());
    }
    return torch::jit::toPyObject(value);
  };
  const size_t first = stack.size() - returns.size();
  py::object result = py::none();
  if (returns.size() == 1) {
    result = convert(stack[first]);
  } else if (!returns.empty()) {
    py::tuple values(returns.size());
    for (size_t i = 0; i < returns.size(); ++i) values[i] = convert(stack[first + i]);
    result = std::move(values);
  }
  torch::jit::drop(stack, returns.size());
  return result;
}

void PythonConverter::push_arguments(const py::tuple& values, torch::jit::Stack& stack) const {
  const auto& arguments = schema_.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(torch::jit::toIValue(values[i], arguments[i].type()));
  }
}

// --------------------------------------------------------------------------- PythonImpl

PythonImpl::PythonImpl(py::object override, py::object function, bool takes_keyset, bool falls_back,
                       uint32_t checked_hits, std::shared_ptr<const PythonConverter> converter,
                       std::shared_ptr<const PythonHooks> hooks, std::string display_name)
    : override_(std::move(override)),
      function_(std::move(function)),
      takes_keyset_(takes_keyset),
      falls_back_(falls_back),
      checked_hits_(checked_hits),
      converter_(std::move(converter)),
      hooks_(std::move(hooks)),
      display_name_(std::move(display_name)) {}

namespace {

// Whether hooks get what this thread's calls save for their backward.
bool are_saved_tensors_hooked() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

}  // namespace

bool PythonImpl::takes(const Override&, Call& call) {
  const PythonAccess python;
  if (!python) return false;
  const auto values = converter_->to_python(call.begin());
  const auto answer = call_python(hooks_->takes.get(), override_.get(), values);
  call.wants_native = answer.is_none();
  return answer.is(py::handle(Py_True));
}

bool PythonImpl::quarantine(const Call& call) {
  quarantined_kinds_.add(kind_of(call, *converter_));
  any_quarantined_.store(true, std::memory_order_release);
  return true;
}

// Evaluated in C++, so that a failure for one kind adds no Python to calls of other kinds.
bool PythonImpl::is_quarantined(const Call& call) {
  return C10_UNLIKELY(any_quarantined_.load(std::memory_order_acquire)) &&
         quarantined_kinds_.count(kind_of(call, *converter_)) > 0;
}

bool PythonImpl::run(const Override& override, Call& call, c10::Device device) {
  const bool is_differentiated =
      override.is_differentiated && !call.excluded.has(c10::DispatchKey::ADInplaceOrView);
  // Checkpointing may run the call again, and compares what is saved. Python sees to that.
  const bool is_repeatable = is_differentiated && falls_back_ && are_saved_tensors_hooked();
  if (is_quarantined(call) && !(is_repeatable && takes(override, call))) return false;
  const PythonAccess python;
  if (!python) return false;
  const bool accelerated = !device.is_cpu();
  bool capturing = false;
  if (accelerated) {
    capturing = call_python(hooks_->is_capturing.get()).is(py::handle(Py_True));
    if (C10_UNLIKELY(capturing) && ran_calls_.count(exact_key(call)) == 0) {
      override.misses->add();
      call_python(hooks_->warn_captured.get(), override_.get());
      return false;
    }
  }
  // Calls that autograd differentiates through the impl are checked apart.
  const uint64_t kind = kind_of(call, *converter_) ^ (is_differentiated ? kDifferentiated : 0);
  // Computed before the call, because an impl may write to its arguments.
  const uint64_t exact = accelerated ? exact_key(call) : 0;
  const bool first = !capturing && checked_kinds_.count(kind) < checked_hits_;
  const bool in_python = first || is_repeatable;
  if (!in_python) override.hits->add();  // Python counts its own
  auto results = in_python ? call_first_hit(call)
                           : call_function(override, call, capturing, is_differentiated);
  call.set_results(results);
  if (first) checked_kinds_.add(kind);
  if (accelerated && !capturing && ran_calls_.count(exact) == 0) ran_calls_.add(exact);
  return true;
}

std::vector<c10::IValue> PythonImpl::results(py::handle result) const {
  try {
    return converter_->to_results(result, display_name_);
  } catch (const py::type_error& error) {
    PyErr_SetString(hooks_->contract_error.get().ptr(), error.what());
    throw py::error_already_set();
  }
}

std::vector<c10::IValue> PythonImpl::call_first_hit(const Call& call) const {
  const auto values = converter_->to_python(call.begin());
  const auto keyset = py::cast(call.keyset);
  const auto result = call_python(hooks_->first_hit.get(), override_.get(), keyset, values);
  return converter_->to_results(result, display_name_);  // Python has checked it
}

std::vector<c10::IValue> PythonImpl::call_function(const Override& override, const Call& call,
                                                   bool capturing, bool is_differentiated) const {
  try {
    const auto result = vectorcall(call);
    if (!result) throw py::error_already_set();
    auto found = results(result);
    if (is_differentiated) check_differentiated(override, found);  // not of what native returns
    return found;
  } catch (py::error_already_set& error) {
    if (falls_back_ && !capturing) return recover(call, error);
    error.restore();
  }
  throw_python_error();
}

// A call's first hits are compared with native, which says whether its result has a derivative.
void PythonImpl::check_differentiated(const Override& override,
                                      c10::ArrayRef<c10::IValue> results) const {
  const auto derived = derivative_of(results);
  if (derived == Derived::Yes) override.has_made_derivative.store(true, std::memory_order_relaxed);
  if (derived != Derived::No || !override.has_made_derivative.load(std::memory_order_relaxed))
    return;
  const std::string message =
      display_name_ +
      " is declared with autograd='impl' and returned what autograd cannot differentiate; let its "
      "impl call ops that have derivatives, outside of torch.no_grad()";
  PyErr_SetString(hooks_->contract_error.get().ptr(), message.c_str());
  throw py::error_already_set();
}

std::vector<c10::IValue> PythonImpl::recover(const Call& call,
                                             const py::error_already_set& error) const {
  // Before 3.12 an exception that C fetched has its traceback beside it. Python looks whether a
  // signal handler raised it.
  if (error.trace()) PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
  const auto values = converter_->to_python(call.begin());
  const auto keyset = py::cast(call.keyset);
  const auto result =
      call_python(hooks_->recover.get(), override_.get(), keyset, values, error.value());
  return converter_->to_results(result, display_name_);
}

py::object PythonImpl::vectorcall(const Call& call) const {
  const auto* arguments = call.begin();
  std::vector<py::object> owned;
  owned.reserve(call.argument_count + 1);
  if (takes_keyset_) owned.push_back(py::cast(call.impl_keyset()));
  for (size_t i = 0; i < call.argument_count; ++i) {
    owned.push_back(converter_->to_python(i, arguments[i]));
  }
  std::vector<PyObject*> borrowed;
  borrowed.reserve(owned.size() + 1);
  borrowed.push_back(nullptr);  // the slot that PY_VECTORCALL_ARGUMENTS_OFFSET requires
  for (const auto& value : owned) borrowed.push_back(value.ptr());
  const size_t positional = converter_->positional() + (takes_keyset_ ? 1 : 0);
  const BelowTorchFunction below(owned);
  const ExcludeKeys exclude(call.excluded);
  return py::reinterpret_steal<py::object>(PyObject_Vectorcall(
      function_.get().ptr(), borrowed.data() + 1, positional | PY_VECTORCALL_ARGUMENTS_OFFSET,
      converter_->keyword_names().ptr()));
}

// --------------------------------------------------------------------------- Placeholder

bool Placeholder::takes(const Override&, Call&) {
  const PythonAccess python;
  return python && call_python(register_overrides_.get()).is(py::handle(Py_True));
}

}  // namespace opgraft
