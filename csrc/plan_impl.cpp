#include "plan_impl.h"

#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "plan_recorder.h"
#include "plan_saving.h"
#include "plan_steps.h"
#include "torch_private.h"

namespace opgraft {

namespace {

// In this mode `torch.empty` fills uninitialised memory, which a replay does not, and an impl may
// compute in another way. Nor may a kernel depend on when a call is made.
bool is_deterministic_mode() { return at::globalContext().deterministicAlgorithms(); }

// --------------------------------------------------------------------------- Triton's launch hooks

// Never freed, and neither are the objects. Their sizes are read without the GIL. Each is one
// aligned word, and a slightly outdated size only means that a launch came slightly earlier.
struct LaunchHooks {
  std::vector<PyListObject*> lists;
  struct Holder {
    PyDictObject* dict;
    Py_ssize_t size;
  };
  std::vector<Holder> holders;
  PyObject* changed = nullptr;
};

std::atomic<const LaunchHooks*> launch_hooks{nullptr};

// Captures of CUDA graphs that are going on, in whatever thread.
std::atomic<int> captures{0};

Py_ssize_t size_of(const Py_ssize_t& size) { return __atomic_load_n(&size, __ATOMIC_RELAXED); }

bool launch_hooks_are_set() {
  const LaunchHooks* hooks = launch_hooks.load(std::memory_order_acquire);
  if (hooks == nullptr) return false;
  for (const PyListObject* list : hooks->lists) {
    if (size_of(list->ob_base.ob_size) > 0) return true;
  }
  for (const auto& holder : hooks->holders) {
    if (size_of(holder.dict->ma_used) == holder.size) continue;
    const PythonAccess python;
    return !python || call_python(hooks->changed).cast<bool>();
  }
  return false;
}

}  // namespace

void watch_launch_hooks(const std::vector<py::list>& lists, const std::vector<py::dict>& holders,
                        py::object changed) {
  auto hooks = std::make_unique<LaunchHooks>();
  for (py::list list : lists) {
    hooks->lists.push_back(reinterpret_cast<PyListObject*>(list.release().ptr()));
  }
  for (py::dict holder : holders) {
    auto* dict = reinterpret_cast<PyDictObject*>(holder.release().ptr());
    hooks->holders.push_back({dict, dict->ma_used});
  }
  hooks->changed = changed.release().ptr();
  launch_hooks.store(hooks.release(), std::memory_order_release);
}

// --------------------------------------------------------------------------- PlannedImpl

PlannedImpl::PlannedImpl(std::unique_ptr<Impl> impl, Options options)
    : impl_(std::move(impl)), options_(std::move(options)) {}

bool PlannedImpl::run(const Override& override, Call& call, c10::Device device) {
  if (is_quarantined(call)) return false;
  PlanKey key;
  const auto keyset = options_.takes_keyset ? call.keyset : c10::DispatchKeySet();
  const bool only_loaded = options_.table->only_loaded();
  const auto arguments = call.view();
  if (C10_UNLIKELY(is_routed_by_itself(arguments.data())) || !key.read(arguments, keyset)) {
    return only_loaded ? miss(override) : run_unplanned(override, call, device, true);
  }
  try {
    switch (replay(override, call, key)) {
      case ReplayResult::Replayed:
        return true;
      case ReplayResult::HooksSet:
        return only_loaded ? miss(override) : impl_->run(override, call, device);
      case ReplayResult::Unproven:
        // Verification wants to see the impl.
        if (options_.table->runs_all()) return impl_->run(override, call, device);
        return prove(override, call, device, key);
      case ReplayResult::NoPlan:
        break;
    }
  } catch (const LaunchError&) {
    // The plan's kernel or the device is gone. Python finds out which, unless arguments may be half
    // written.
    options_.table->drop(key);
    if (options_.writes) throw;
  }
  if (C10_UNLIKELY(only_loaded)) {
    if (options_.table->is_asked(key)) return miss(override);
    ask_for_kernels(call, key);
    const bool is_loaded = replay(override, call, key) == ReplayResult::Unproven;
    return is_loaded ? prove(override, call, device, key) : miss(override);
  }
  const auto action = options_.table->action_for(key);
  const auto kernels =
      needs_kernels(action, call.view().data()) ? this->kernels(key) : Kernels::Ready;
  if (kernels == Kernels::NotReady) options_.table->set_asked(key);
  if (kernels == Kernels::NotReady ||
      (kernels == Kernels::NotAskedFor && !ask_for_kernels(call, key))) {
    override.misses->add();
    return false;
  }
  if (action == PlanTable::Action::Record) return record(override, call, device, key);
  if (action == PlanTable::Action::Wait) options_.table->note_seen(key);
  return run_unplanned(override, call, device, may_run_in_python(action));
}

bool PlannedImpl::is_routed_by_itself(const Argument* arguments) const {
  if (is_deterministic_mode()) return true;
  return options_.without_random_numbers && !options_.without_random_numbers->holds(arguments);
}

PlannedImpl::ReplayResult PlannedImpl::replay(const Override& override, Call& call,
                                              const PlanKey& key) {
  const Epochs::Reader reader;
  const PlanEntry* entry = options_.table->find(key);
  if (entry == nullptr) return ReplayResult::NoPlan;
  if (!entry->proven.load(std::memory_order_acquire)) return ReplayResult::Unproven;
  if (entry->plan->watches_hooks() && launch_hooks_are_set()) return ReplayResult::HooksSet;
  torch::jit::Stack results;
  const ExcludeKeys exclude(call.excluded);
  entry->plan->replay(call.view().data(), results);
  call.set_results(results);
  count_replay(override, *entry);
  return ReplayResult::Replayed;
}

void PlannedImpl::count_replay(const Override& override, const PlanEntry& entry) const {
  override.hits->add();
  options_.table->count_replay(entry);
}

// A call that is replayed, or that runs native, needs neither boxed arguments nor a list of the
// other overrides. If there is a plan, the condition's other tests need no evaluation: the
// condition held when the plan was recorded, and those tests depend only on what is in the key.
Impl::UnboxedDecision PlannedImpl::decide_unboxed(const Override& override,
                                                  c10::ArrayRef<Argument> arguments,
                                                  bool condition_holds) {
  PlanKey key;
  const bool has_key = !is_routed_by_itself(arguments.data()) && !options_.takes_keyset &&
                       !impl_->has_quarantined() && key.read(arguments);
  if (has_key) {
    if (const PlanEntry* entry = options_.table->find(key)) {
      if (!entry->proven.load(std::memory_order_acquire)) return {};
      if (entry->plan->watches_hooks() && launch_hooks_are_set()) return {};
      return {UnboxedDecision::Kind::Replays, entry};
    }
  }
  if (!condition_holds && !override.condition.passes_other_tests(arguments.data())) {
    override.misses->add();
    return {UnboxedDecision::Kind::Declines};
  }
  if (C10_UNLIKELY(options_.table->only_loaded())) {
    if (has_key && !options_.table->is_asked(key)) return {};
    miss(override);
    return {UnboxedDecision::Kind::Declines};
  }
  if (!has_key) return {};
  const auto action = options_.table->action_for(key);
  switch (needs_kernels(action, arguments.data()) ? kernels(key) : Kernels::Ready) {
    case Kernels::NotAskedFor:
      return {};
    case Kernels::NotReady:
      options_.table->set_asked(key);
      override.misses->add();
      return {UnboxedDecision::Kind::Declines};
    case Kernels::Ready:
      break;
  }
  if (action == PlanTable::Action::Record) return {};
  if (is_worth_python(arguments.data(), may_run_in_python(action)))
    return {};  // `run` notes the key
  if (action == PlanTable::Action::Wait) options_.table->note_seen(key);
  override.misses->add();
  return {UnboxedDecision::Kind::Declines};
}

// Returns false if the launch failed. The call then takes the boxed path, which handles the
// failure.
bool PlannedImpl::replay_unboxed(const Override& override, const PlanEntry& entry,
                                 const Argument* arguments, torch::jit::Stack& results) {
  try {
    entry.plan->replay(arguments, results);
  } catch (const LaunchError&) {
    if (options_.writes) throw;
    results.clear();
    return false;
  }
  count_replay(override, entry);
  return true;
}

// Not where it can have no plan and is not worth Python: it is native's, whatever is compiled.
bool PlannedImpl::needs_kernels(PlanTable::Action action, const Argument* arguments) const {
  const bool may_have_plan =
      action == PlanTable::Action::Wait || action == PlanTable::Action::Record;
  return C10_UNLIKELY(options_.table->is_gated()) && !RunUnready::here(options_.table.get()) &&
         (may_have_plan || is_worth_python(arguments, may_run_in_python(action)));
}

// While graphs are captured, each call asks whose kernels are not ready: one of those that are
// captured is told of. Others need not find out whether they are.
PlannedImpl::Kernels PlannedImpl::kernels(const PlanKey& key) const noexcept {
  const PlanTable& table = *options_.table;
  if (C10_LIKELY(!table.is_gated()) || table.runs_all() || table.is_ready(key)) {
    return Kernels::Ready;
  }
  const bool must_ask = captures.load(std::memory_order_relaxed) > 0 || !table.is_asked(key);
  return must_ask ? Kernels::NotAskedFor : Kernels::NotReady;
}

// Called once for each key. Later calls find that the kernels have been asked for.
bool PlannedImpl::ask_for_kernels(Call& call, const PlanKey& key) const {
  const PythonAccess python;
  if (!python) return false;
  const auto values = options_.converter->to_python(call.begin());
  const auto keyset = py::cast(call.keyset);
  const auto token = py::cast(key);
  options_.table->set_asked(key);
  const auto answer =
      try_python(options_.ask.get(), options_.override.get(), keyset, values, token);
  if (answer) return answer.is(py::handle(Py_True));
  // Nobody has got the request: a later call asks again. Only an interrupt is the caller's, not
  // that there was no stack left for this, where native needs none.
  options_.table->forget(key);
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw_python_error();
  PyErr_Clear();
  return false;
}

// Once recordings are used up, an impl runs in Python only if `unplanned` says for which calls.
bool PlannedImpl::may_run_in_python(PlanTable::Action action) const {
  return action != PlanTable::Action::Stopped || options_.unplanned.has_value();
}

bool PlannedImpl::is_worth_python(const Argument* arguments, bool in_python) const {
  if (options_.table->runs_all()) return true;
  return in_python && (!options_.unplanned || options_.unplanned->holds(arguments));
}

bool PlannedImpl::run_unplanned(const Override& override, Call& call, c10::Device device,
                                bool in_python) {
  if (!is_worth_python(call.view().data(), in_python)) {
    override.misses->add();
    return false;
  }
  return impl_->run(override, call, device);
}

bool PlannedImpl::record(const Override& override, Call& call, c10::Device device,
                         const PlanKey& key) {
  const PythonAccess python;
  if (!python) return false;
  // A recording's allocations and copies must not be captured into a graph.
  if (is_capturing(device)) return run_unplanned(override, call, device, true);
  run_recording(call, key);
  return true;
}

bool PlannedImpl::miss(const Override& override) {
  override.misses->add();
  return false;
}

bool PlannedImpl::prove(const Override& override, Call& call, c10::Device device,
                        const PlanKey& key) {
  const PythonAccess python;
  if (!python) return miss(override);
  if (is_capturing(device)) {
    ask_for_kernels(call, key);
    return miss(override);
  }
  run_recording(call, key);
  return true;
}

bool PlannedImpl::is_capturing(c10::Device device) const {
  return !device.is_cpu() && call_python(options_.is_capturing.get()).is(py::handle(Py_True));
}

void PlannedImpl::run_recording(Call& call, const PlanKey& key) {
  const auto values = options_.converter->to_python(call.begin());
  const auto keyset = py::cast(call.keyset);
  const auto token = py::cast(key);
  const auto result =
      call_python(options_.record.get(), options_.override.get(), keyset, values, token);
  auto results = options_.converter->to_results(result, "a recorded impl");
  call.set_results(results);
}

}  // namespace opgraft

// --------------------------------------------------------------------------- Python

namespace opgraft {

namespace {

Pointer to_pointer(Recorder& recorder, py::handle value) {
  if (value.is_none()) return {};
  return recorder.locate(value.cast<at::Tensor>());
}

// Converts an adapter's descriptions of a kernel's parameters: ("value", bits), ("pointer", tensor
// or None), ("scratch", bytes), ("map", the map's bytes, tensor).
Parameters to_parameters(Recorder& recorder, const std::vector<py::tuple>& parameters) {
  Parameters result;
  for (const py::tuple& parameter : parameters) {
    const auto kind = parameter[0].cast<std::string>();
    if (kind == "value") {
      result.add_value(parameter[1].cast<uint64_t>());
      recorder.check_number(parameter[1].cast<uint64_t>());
    } else if (kind == "pointer") {
      result.add_pointer(to_pointer(recorder, parameter[1]));
    } else if (kind == "scratch") {
      result.add_pointer(recorder.scratch(parameter[1].cast<size_t>()));
    } else if (kind == "map") {
      const auto bytes = parameter[1].cast<std::string>();
      TensorMap map;
      TORCH_CHECK(bytes.size() == sizeof(map.words), "a tensor map has 128 bytes");
      std::memcpy(map.words.data(), bytes.data(), bytes.size());
      result.add_tensor_map(map, to_pointer(recorder, parameter[2]));
    } else {
      throw py::value_error("no such parameter: " + kind);
    }
  }
  return result;
}

// --------------------------------------------------------------------------- tvm-ffi functions

// While it lives, a call of the spy on this thread is recorded, and passed on to `handle`.
struct FfiSpy {
  Recorder& recorder;
  void* handle;
  std::vector<at::Tensor> tensors;  // the call's tensor arguments, to find the origin of addresses
};
thread_local FfiSpy* ffi_spy = nullptr;

bool spy_on(FfiSpy& spy, const ffi::Any* arguments, int32_t count, void* stream) {
  std::vector<FfiCall::Argument> recorded;
  for (int32_t i = 0; i < count; ++i) {
    FfiCall::Argument argument;
    argument.value = arguments[i];
    const ffi::Tensor* tensor = nullptr;
    switch (arguments[i].type_index) {
      case ffi::kInt:
        spy.recorder.check_number(static_cast<uint64_t>(arguments[i].integer));
        break;
      case ffi::kNone:
      case ffi::kBool:
      case ffi::kFloat:
      case ffi::kDataType:
      case ffi::kDevice:
      case ffi::kSmallStr:
        break;
      case ffi::kOpaquePtr:
        argument.is_stream = arguments[i].pointer == stream;
        if (!argument.is_stream) {
          spy.recorder.refuse("a kernel got an address that no tensor stands for");
          return false;
        }
        break;
      case ffi::kDLTensorPtr:
        tensor = static_cast<const ffi::Tensor*>(arguments[i].pointer);
        break;
      case ffi::kTensor:
        tensor = reinterpret_cast<const ffi::Tensor*>(
            static_cast<const char*>(arguments[i].pointer) + sizeof(ffi::Object));
        break;
      default:
        spy.recorder.refuse("a kernel got an argument that a plan cannot hold (tvm-ffi type " +
                            std::to_string(arguments[i].type_index) + ")");
        return false;
    }
    if (tensor != nullptr) {
      argument.is_tensor = true;
      argument.tensor = *tensor;
      argument.shape.assign(tensor->shape, tensor->shape + tensor->ndim);
      argument.strides.assign(tensor->strides, tensor->strides + tensor->ndim);
      const auto* address = static_cast<const char*>(tensor->data);
      const auto known =
          std::find_if(spy.tensors.begin(), spy.tensors.end(), [address](const at::Tensor& each) {
            return each.numel() > 0 && static_cast<const char*>(each.const_data_ptr()) == address;
          });
      if (known == spy.tensors.end()) {
        spy.recorder.refuse("a kernel got a tensor that was not among its arguments in Python");
        return false;
      }
      argument.pointer = spy.recorder.locate(*known);
    }
    recorded.push_back(std::move(argument));
  }
  spy.recorder.add(
      std::make_unique<FfiCall>(reinterpret_cast<uint64_t>(spy.handle), std::move(recorded)));
  return true;
}

int spied_call(void*, const ffi::Any* arguments, int32_t count, ffi::Any* result) {
  FfiSpy* spy = ffi_spy;
  if (spy == nullptr) return -1;
  try {
    void* stream = Replay(nullptr, spy->recorder.device(), 0).stream();
    spy_on(*spy, arguments, count, stream);
  } catch (const std::exception& error) {
    spy->recorder.refuse(error.what());
  }
  return call_ffi(spy->handle, arguments, count, result);
}

py::object call_spied(Recorder& recorder, uint64_t handle, std::vector<at::Tensor> tensors,
                      const py::object& call) {
  FfiSpy spy{recorder, reinterpret_cast<void*>(handle), std::move(tensors)};
  struct Restore {
    FfiSpy* before = std::exchange(ffi_spy, nullptr);
    ~Restore() { ffi_spy = before; }
  } restore;
  ffi_spy = &spy;
  return call();
}

// DLPack's numbers of a dtype; nullopt for one that DLPack has not.
std::optional<std::tuple<uint8_t, uint8_t, uint16_t>> dlpack_dtype(c10::ScalarType dtype) {
  constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6;
  const auto bits = static_cast<uint8_t>(8 * c10::elementSize(dtype));
  if (dtype == c10::kBool) return std::tuple(kBool, bits, uint16_t{1});
  if (dtype == c10::kByte) return std::tuple(kUInt, bits, uint16_t{1});
  if (dtype == c10::kBFloat16) return std::tuple(kBfloat, bits, uint16_t{1});
  if (c10::isIntegralType(dtype, /*includeBool=*/false)) {
    return std::tuple(kInt, bits, uint16_t{1});
  }
  if (dtype == c10::kHalf || dtype == c10::kFloat || dtype == c10::kDouble) {
    return std::tuple(kFloat, bits, uint16_t{1});
  }
  return std::nullopt;
}

bool is_tensor(py::handle value) {
  return py::detail::make_caster<at::Tensor>().load(value, /*convert=*/false);
}

// Records a call of a tvm-ffi function that is not made: its arguments are tensors without memory
// and numbers, of which Python's converter makes what is made here.
void record_ffi_call(Recorder& recorder, uint64_t function, const py::tuple& values) {
  std::vector<FfiCall::Argument> arguments;
  for (const auto value : values) {
    FfiCall::Argument argument;
    if (is_tensor(value)) {
      const auto tensor = value.cast<at::Tensor>();
      const auto dtype = dlpack_dtype(tensor.scalar_type());
      if (!dtype) return recorder.refuse("a kernel gets a tensor of a dtype that DLPack has not");
      argument.is_tensor = true;
      argument.pointer = recorder.locate(tensor);
      argument.shape = tensor.sizes().vec();
      argument.strides = tensor.strides().vec();
      argument.tensor = ffi::tensor_on(recorder.device(), *dtype, argument.shape.size());
    } else if (py::isinstance<py::bool_>(value)) {
      argument.value.type_index = ffi::kBool;
      argument.value.integer = value.cast<bool>() ? 1 : 0;
    } else if (py::isinstance<py::int_>(value)) {
      argument.value.type_index = ffi::kInt;
      argument.value.integer = value.cast<int64_t>();
      recorder.check_number(static_cast<uint64_t>(argument.value.integer));
    } else if (py::isinstance<py::float_>(value)) {
      const auto number = value.cast<double>();
      argument.value.type_index = ffi::kFloat;
      std::memcpy(&argument.value.integer, &number, sizeof(number));
    } else if (!value.is_none()) {
      return recorder.refuse("a kernel gets an argument that is no tensor, number or None");
    }
    arguments.push_back(std::move(argument));
  }
  recorder.add(
      std::make_unique<FfiCall>(function, std::move(arguments), FfiCall::Callee::Function));
}

torch::jit::Stack stack_of(const py::tuple& values, const std::string& name,
                           const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  torch::jit::Stack stack;
  PythonConverter(op.schema()).push_arguments(values, stack);
  return stack;
}

const c10::FunctionSchema& schema_of(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()).schema();
}

// A recorder of an impl that runs on fake tensors, and what it recorded; see ready/dry.py.
std::shared_ptr<Recorder> dry_recorder(const std::string& name, const std::string& overload,
                                       const py::tuple& values, c10::Device device) {
  return std::make_shared<Recorder>(schema_of(name, overload), stack_of(values, name, overload),
                                    device, Recorder::Tensors::Fake);
}

py::object finish_dry(Recorder& recorder, const std::string& name, const std::string& overload,
                      const py::object& result) {
  const PythonConverter converter(schema_of(name, overload));
  const auto plan =
      recorder.finish(converter.to_results(result, "a recorded impl"), PythonRef(py::none()));
  if (plan == nullptr) return py::none();
  return saved_plan(*plan);
}

std::optional<PlanKey> plan_key(const py::tuple& values, const std::string& name,
                                const std::string& overload, bool portable) {
  const auto stack = stack_of(values, name, overload);
  std::optional<PlanKey> key(std::in_place, portable);
  if (!key->read(view(stack))) key.reset();
  return key;
}

// Whether a call can have a plan's key. Fake tensors are assumed to stand for tensors that can.
bool has_plan_key(const py::tuple& values, const std::string& name, const std::string& overload) {
  const auto stack = stack_of(values, name, overload);
  const auto stands_in = [](const c10::IValue& value) {
    return value.isTensor() &&
           (value.toTensor().unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
            value.toTensor().key_set().has(c10::DispatchKey::Python));
  };
  for (const c10::IValue& value : stack) {
    if (stands_in(value)) return true;
    if (!value.isList()) continue;
    const auto items = value.toListRef();
    if (std::any_of(items.begin(), items.end(), stands_in)) return true;
  }
  return PlanKey().read(view(stack));
}

// `RunUnready` as a context manager. It is left on the thread that entered it.
class UnreadyScope {
 public:
  explicit UnreadyScope(std::shared_ptr<const PlanTable> table) : table_(std::move(table)) {}
  void enter() { scope_.emplace(table_.get()); }
  void exit(const py::args&) { scope_.reset(); }

 private:
  std::shared_ptr<const PlanTable> table_;
  std::optional<RunUnready> scope_;
};

}  // namespace

void bind_plans(py::module_& core) {
  pthread_atfork([] { PlanTable::lock(); }, [] { PlanTable::unlock(); },
                 [] {
                   PlanTable::unlock();
                   forks.fetch_add(1, std::memory_order_relaxed);
                 });

  core.def("has_plan_key", &has_plan_key, py::arg("values"), py::arg("name"), py::arg("overload"));
  core.def("plan_key", &plan_key, py::arg("values"), py::arg("name"), py::arg("overload"),
           py::arg("portable") = false,
           "The key of a call with these arguments on this thread; None if it has none. A portable "
           "one is the same on each of a machine's devices.");
  core.def(
      "count_captures", [](int more) { captures.fetch_add(more, std::memory_order_relaxed); },
      py::arg("more"), "Count the captures of CUDA graphs that are going on.");
  core.def("saved_plan", &saved_plan, py::arg("plan"), "A plan as JSON can write it.");
  core.def(
      "load_plan",
      [](const std::string& name, const std::string& overload, const py::dict& saved,
         std::vector<uint64_t> functions, c10::Device device, py::object keep_alive) {
        return load_plan(schema_of(name, overload), saved, std::move(functions), device,
                         std::move(keep_alive));
      },
      py::arg("name"), py::arg("overload"), py::arg("saved"), py::arg("functions"),
      py::arg("device"), py::arg("keep_alive"), "The plan that `saved_plan` wrote.");
  core.def(
      "load_cuda_kernel",
      [](const py::bytes& image, std::string name, uint32_t shared, uint32_t cluster,
         c10::Device device) {
        const CudaKernel kernel{image, std::move(name), shared, cluster};
        const py::gil_scoped_release release;
        return load_cuda_kernel(kernel, device.index());
      },
      py::arg("image"), py::arg("name"), py::arg("shared"), py::arg("cluster"), py::arg("device"),
      "Loads a kernel of a cubin onto a device. Returns its address.");
  core.def("dry_recorder", &dry_recorder, py::arg("name"), py::arg("overload"), py::arg("values"),
           py::arg("device"), "A recorder of an impl that runs on fake tensors.");
  core.def("finish_dry", &finish_dry, py::arg("recorder"), py::arg("name"), py::arg("overload"),
           py::arg("result"), "What it recorded, as `saved_plan`; None if it was refused.");
  py::register_exception<SavingError>(core, "SavingError");

  py::class_<PlanKey>(core, "PlanKey", "The key of a plan: a call's metadata, as integers.")
      .def("__hash__", &PlanKey::hash)
      .def("__eq__",
           [](const PlanKey& self, const PlanKey& other) {
             return self == std::vector<uint64_t>(other.words(), other.words() + other.size());
           })
      .def("__len__", &PlanKey::size)
      .def_property_readonly("words",
                             [](const PlanKey& self) {
                               return std::vector<uint64_t>(self.words(),
                                                            self.words() + self.size());
                             })
      .def("has_same_arguments", &PlanKey::has_same_arguments, py::arg("other"),
           "Whether two calls differ at most in the state of their threads.");

  py::class_<Plan, std::shared_ptr<Plan>>(core, "Plan")
      .def_property_readonly("fingerprint",
                             [](const Plan& self) { return py::bytes(self.fingerprint()); })
      .def_property_readonly("launches", &Plan::launches)
      .def_property_readonly("bytes", &Plan::bytes)
      .def_property_readonly("watches_hooks", &Plan::watches_hooks)
      .def("__str__", &Plan::text);

  py::class_<PlanEntry, std::shared_ptr<PlanEntry>>(core, "PlanEntry")
      .def_readonly("key", &PlanEntry::label)
      .def_property_readonly("proven", [](const PlanEntry& self) { return self.proven.load(); })
      .def_property_readonly("hits", [](const PlanEntry& self) { return self.replays.total(); })
      .def_property_readonly("bytes", &PlanEntry::bytes)
      .def_property_readonly("steps", [](const PlanEntry& self) { return self.plan->text(); });

  py::class_<UnreadyScope>(core, "RunUnready",
                           "A scope in which this thread's calls of an override run what is not "
                           "ready.")
      .def(py::init([](std::shared_ptr<PlanTable> table) {
             return std::make_unique<UnreadyScope>(std::move(table));
           }),
           py::arg("table"))
      .def("__enter__", &UnreadyScope::enter)
      .def("__exit__", &UnreadyScope::exit);

  py::class_<PlanTable, std::shared_ptr<PlanTable>>(core, "PlanTable")
      .def(py::init([](size_t plans, uint64_t free_recordings, uint64_t replays_per_recording,
                       uint32_t refusals) {
             return std::make_shared<PlanTable>(
                 PlanLimits{plans, free_recordings, replays_per_recording, refusals});
           }),
           py::arg("plans"), py::arg("free_recordings"), py::arg("replays_per_recording"),
           py::arg("refusals"))
      .def(
          "install",
          [](PlanTable& self, const PlanKey& key, std::shared_ptr<Plan> plan, std::string label,
             uint64_t generation, bool proven) {
            return self.install(key, std::move(plan), std::move(label), generation, proven);
          },
          py::arg("key"), py::arg("plan"), py::arg("label"), py::arg("generation"),
          py::arg("proven") = true)
      .def("prove", &PlanTable::prove, py::arg("key"),
           "Let a plan serve calls that was installed as unproven.")
      .def("refuse", &PlanTable::refuse)
      .def("drop", &PlanTable::drop, py::arg("key"), py::call_guard<py::gil_scoped_release>(),
           "Remove a plan, as a failed replay does: without the GIL.")
      .def("clear", &PlanTable::clear)
      .def("count_recording", &PlanTable::count_recording)
      .def("find",
           [](const PlanTable& self, const PlanKey& key) {
             const Epochs::Reader reader;
             return self.find(key) != nullptr;
           })
      .def_property_readonly("generation", &PlanTable::generation)
      .def_property_readonly("recordings", &PlanTable::recordings)
      .def_property_readonly("stopped", &PlanTable::stopped)
      .def_property_readonly("given_up", &PlanTable::given_up)
      .def_property("runs_all", &PlanTable::runs_all, &PlanTable::run_all)
      .def_property("gated", &PlanTable::is_gated, &PlanTable::gate)
      .def_property("only_loaded", &PlanTable::only_loaded, &PlanTable::take_only_loaded)
      .def("is_ready", &PlanTable::is_ready, py::arg("key"))
      .def("set_ready", &PlanTable::set_ready, py::arg("key"))
      .def("set_asked", &PlanTable::set_asked, py::arg("key"))
      .def("times_asked", &PlanTable::times_asked, py::arg("key"))
      .def("forget", &PlanTable::forget, py::arg("key"))
      .def("forget_asked", &PlanTable::forget_asked)
      .def("entries", [](const PlanTable& self) {
        std::vector<std::shared_ptr<PlanEntry>> entries;
        for (const auto& entry : self.entries()) {
          entries.push_back(std::const_pointer_cast<PlanEntry>(entry));
        }
        return entries;
      });

  py::class_<Recorder, std::shared_ptr<Recorder>>(core, "Recorder")
      .def("start", &Recorder::start)
      .def("stop", &Recorder::stop)
      .def("refuse", &Recorder::refuse)
      .def("watch_hooks", &Recorder::watch_hooks,
           "The plan is not to be replayed while Triton's launch hooks are set.")
      .def_property_readonly("refusal", &Recorder::refusal)
      .def_property_readonly("inside_op", &Recorder::inside_op)
      .def_property_readonly(
          "inside_call", [](const Recorder&) { return ffi_spy != nullptr; },
          "Whether a call of a tvm-ffi function is in progress, which converts its arguments.")
      .def_property_readonly("device", &Recorder::device)
      .def(
          "cuda_launch",
          [](Recorder& self, uint64_t function, std::array<uint32_t, 3> grid, uint32_t threads,
             uint32_t shared, uint32_t cluster, bool cooperative, bool dependent,
             const std::vector<py::tuple>& parameters, std::string name) {
            auto filled = to_parameters(self, parameters);
            self.add(std::make_unique<CudaLaunch>(
                function, CudaLaunchShape{grid, threads, shared, cluster, cooperative, dependent},
                std::move(filled), std::move(name)));
          },
          py::arg("function"), py::arg("grid"), py::arg("threads"), py::arg("shared"),
          py::arg("cluster"), py::arg("cooperative"), py::arg("dependent"), py::arg("parameters"),
          py::arg("name"))
      .def(
          "function_call",
          [](Recorder& self, uint64_t function, const std::vector<py::tuple>& parameters,
             std::string name) {
            auto filled = to_parameters(self, parameters);
            self.add(
                std::make_unique<FunctionCall>(reinterpret_cast<FunctionCall::Function>(function),
                                               std::move(filled), std::move(name)));
          },
          py::arg("function"), py::arg("parameters"), py::arg("name"))
      .def("dry_ffi_call", &record_ffi_call, py::arg("function"), py::arg("values"),
           "Records a call of a tvm-ffi function that is not made.")
      .def("ffi_call", &call_spied, py::arg("handle"), py::arg("tensors"), py::arg("call"),
           "Runs `call`, which calls the function at `ffi_spy()` instead of the handle's.");

  core.def(
      "ffi_spy", [] { return reinterpret_cast<uint64_t>(&spied_call); },
      "The address of a tvm-ffi function that records a call and forwards it: "
      "`Recorder.ffi_call`.");
  core.def("current_recorder", &Recorder::current, py::return_value_policy::reference,
           "This thread's recorder; None if there is none.");
  core.def("cuda_parameter_sizes", &cuda_parameter_sizes, py::arg("function"),
           "The sizes of a CUfunction's parameters; empty if the driver cannot tell.");
  core.def("watch_launch_hooks", &watch_launch_hooks, py::arg("lists"), py::arg("holders"),
           py::arg("changed"));
}

}  // namespace opgraft
