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
#include "plan_steps.h"
#include "torch_private.h"

namespace opgraft {

namespace {

// Uninitialised memory is to be filled, which `torch.empty` does and a replay does not; and an impl
// may have another way to a deterministic result.
bool is_to_be_deterministic() { return at::globalContext().deterministicAlgorithms(); }

// --------------------------------------------------------------------------- Triton's launch hooks

// Kept for good, as the objects are. Their sizes are read without the GIL: one aligned word each,
// and a value that is late by a moment is no worse than a launch that was earlier by one.
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
  if (C10_UNLIKELY(is_to_be_deterministic()) || !key.read(call.view(), keyset)) {
    return run_unplanned(override, call, device, true);
  }
  try {
    switch (replay(override, call, key)) {
      case Replayed::Yes:
        return true;
      case Replayed::NotWhileHooked:
        return impl_->run(override, call, device);
      case Replayed::NoPlan:
        break;
    }
  } catch (const LaunchError&) {
    // The plan's kernel is gone, or the device is. Python finds out, unless something may be half
    // done.
    options_.table->drop(key);
    if (options_.writes) throw;
  }
  const auto next = options_.table->next(key);
  const auto kernels =
      needs_kernels(next, call.view().data()) ? this->kernels(key) : Kernels::Ready;
  if (kernels == Kernels::NotReady) options_.table->set_asked(key);
  if (kernels == Kernels::NotReady ||
      (kernels == Kernels::NotAskedFor && !ask_for_kernels(call, key))) {
    override.misses->add();
    return false;
  }
  if (next == PlanTable::Next::Record) return record(override, call, device, key);
  if (next == PlanTable::Next::Wait) options_.table->note(key);
  return run_unplanned(override, call, device, may_run_in_python(next));
}

PlannedImpl::Replayed PlannedImpl::replay(const Override& override, Call& call,
                                          const PlanKey& key) {
  const Epochs::Reader reader;
  const PlanEntry* entry = options_.table->find(key);
  if (entry == nullptr) return Replayed::NoPlan;
  if (entry->plan->watches_hooks() && launch_hooks_are_set()) return Replayed::NotWhileHooked;
  torch::jit::Stack results;
  const AsAKernel as_a_kernel(call.excluded);
  entry->plan->replay(call.view().data(), results);
  call.answer(results);
  replayed(override, *entry);
  return Replayed::Yes;
}

void PlannedImpl::replayed(const Override& override, const PlanEntry& entry) const {
  override.hits->add();
  options_.table->count_replay(entry);
}

// What a call that is replayed, and one that is to run natively, do not need: boxes for the
// arguments, a list of who else may want it. A plan was recorded for a call that the condition held
// for, and its key has all that the rest of the condition reads: where there is one, that need not
// be asked.
Impl::Early PlannedImpl::early(const Override& override, c10::ArrayRef<Argument> arguments,
                               bool holds) {
  PlanKey key;
  const bool has_key = !is_to_be_deterministic() && !options_.takes_keyset &&
                       !impl_->has_quarantined() && key.read(arguments);
  if (has_key) {
    if (const PlanEntry* entry = options_.table->find(key)) {
      if (entry->plan->watches_hooks() && launch_hooks_are_set()) return {};
      return {Early::Kind::Replays, entry};
    }
  }
  if (!holds && !override.condition.passes_rest(arguments.data())) {
    override.misses->add();
    return {Early::Kind::Declines};
  }
  if (!has_key) return {};
  const auto next = options_.table->next(key);
  switch (needs_kernels(next, arguments.data()) ? kernels(key) : Kernels::Ready) {
    case Kernels::NotAskedFor:
      return {};
    case Kernels::NotReady:
      options_.table->set_asked(key);
      override.misses->add();
      return {Early::Kind::Declines};
    case Kernels::Ready:
      break;
  }
  if (next == PlanTable::Next::Record) return {};
  if (pays(arguments.data(), may_run_in_python(next))) return {};  // and then it is seen
  if (next == PlanTable::Next::Wait) options_.table->note(key);
  override.misses->add();
  return {Early::Kind::Declines};
}

// False where the launch failed: then the call goes the long way, where that is seen to.
bool PlannedImpl::replay_early(const Override& override, const PlanEntry& entry,
                               const Argument* arguments, torch::jit::Stack& results) {
  try {
    entry.plan->replay(arguments, results);
  } catch (const LaunchError&) {
    if (options_.writes) throw;
    results.clear();
    return false;
  }
  replayed(override, entry);
  return true;
}

// Not where it can have no plan and is not worth Python: it is native's, whatever is compiled.
bool PlannedImpl::needs_kernels(PlanTable::Next next, const Argument* arguments) const {
  const bool may_have_plan = next == PlanTable::Next::Wait || next == PlanTable::Next::Record;
  return C10_UNLIKELY(options_.table->is_gated()) &&
         (may_have_plan || pays(arguments, may_run_in_python(next)));
}

PlannedImpl::Kernels PlannedImpl::kernels(const PlanKey& key) const noexcept {
  const PlanTable& table = *options_.table;
  if (C10_LIKELY(!table.is_gated()) || table.runs_all() || table.is_ready(key)) {
    return Kernels::Ready;
  }
  return table.is_asked(key) ? Kernels::NotReady : Kernels::NotAskedFor;
}

// Once for each key: whoever comes next finds that somebody was asked.
bool PlannedImpl::ask_for_kernels(Call& call, const PlanKey& key) const {
  const PythonAccess python;
  if (!python) return false;
  options_.table->set_asked(key);
  const auto values = options_.signature->to_python(call.begin());
  return call_python(options_.ask.get(), options_.override.get(), py::cast(call.keyset), values,
                     py::cast(key))
      .is(py::handle(Py_True));
}

// Past so many recordings an impl in Python is only worth what its author says.
bool PlannedImpl::may_run_in_python(PlanTable::Next next) const {
  return next != PlanTable::Next::Stopped || options_.unplanned.has_value();
}

bool PlannedImpl::pays(const Argument* arguments, bool in_python) const {
  if (options_.table->runs_all()) return true;
  return in_python && (!options_.unplanned || options_.unplanned->holds(arguments));
}

bool PlannedImpl::run_unplanned(const Override& override, Call& call, c10::Device device,
                                bool in_python) {
  if (!pays(call.view().data(), in_python)) {
    override.misses->add();
    return false;
  }
  return impl_->run(override, call, device);
}

bool PlannedImpl::record(const Override& override, Call& call, c10::Device device,
                         const PlanKey& key) {
  const PythonAccess python;
  if (!python) return false;
  // What a recording does (allocations, copies to compare) has no place in a graph.
  if (!device.is_cpu() && call_python(options_.capturing.get()).is(py::handle(Py_True))) {
    return run_unplanned(override, call, device, true);
  }
  const auto values = options_.signature->to_python(call.begin());
  const auto keyset = py::cast(call.keyset);
  const auto token = py::cast(key);
  const auto result =
      call_python(options_.record.get(), options_.override.get(), keyset, values, token);
  auto results = options_.signature->to_results(result, "a recorded impl");
  call.answer(results);
  return true;
}

}  // namespace opgraft

// --------------------------------------------------------------------------- Python

namespace opgraft {

namespace {

Pointer to_pointer(Recorder& recorder, py::handle value) {
  if (value.is_none()) return {};
  return recorder.locate(value.cast<at::Tensor>());
}

// What an adapter says of a kernel's parameters: ("value", bits), ("pointer", tensor or None),
// ("scratch", bytes), ("map", the map's bytes, tensor).
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

// While it lives, a call of the spy on this thread goes to `handle`, and is recorded.
struct FfiSpy {
  Recorder& recorder;
  void* handle;
  std::vector<at::Tensor> tensors;  // that the call got, by which addresses are known
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

torch::jit::Stack stack_of(const py::tuple& values, const std::string& name,
                           const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  torch::jit::Stack stack;
  Signature(op.schema()).push_arguments(values, stack);
  return stack;
}

std::optional<PlanKey> plan_key(const py::tuple& values, const std::string& name,
                                const std::string& overload) {
  const auto stack = stack_of(values, name, overload);
  std::optional<PlanKey> key(std::in_place);
  if (!key->read(view(stack))) key.reset();
  return key;
}

// Whether a call's arguments can be a plan's key. Stand-ins for tensors are taken to be such as
// can.
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

}  // namespace

void bind_plans(py::module_& core) {
  pthread_atfork([] { PlanTable::lock(); }, [] { PlanTable::unlock(); },
                 [] {
                   PlanTable::unlock();
                   forks.fetch_add(1, std::memory_order_relaxed);
                 });

  core.def("has_plan_key", &has_plan_key, py::arg("values"), py::arg("name"), py::arg("overload"));
  core.def("plan_key", &plan_key, py::arg("values"), py::arg("name"), py::arg("overload"),
           "The key of a call with these arguments on this thread; None where it can have none.");

  py::class_<PlanKey>(core, "PlanKey", "What a plan is for: a call's metadata, as numbers.")
      .def("__hash__", &PlanKey::hash)
      .def("__eq__",
           [](const PlanKey& self, const PlanKey& other) {
             return self == std::vector<uint64_t>(other.words(), other.words() + other.size());
           })
      .def("__len__", &PlanKey::size)
      .def("has_same_arguments", &PlanKey::has_same_arguments, py::arg("other"),
           "Whether two calls differ in the state of their threads at most.");

  py::class_<Plan, std::shared_ptr<Plan>>(core, "Plan")
      .def_property_readonly("fingerprint",
                             [](const Plan& self) { return py::bytes(self.fingerprint()); })
      .def_property_readonly("launches", &Plan::launches)
      .def_property_readonly("bytes", &Plan::bytes)
      .def("__str__", &Plan::text);

  py::class_<PlanEntry, std::shared_ptr<PlanEntry>>(core, "PlanEntry")
      .def_readonly("key", &PlanEntry::label)
      .def_property_readonly("hits", [](const PlanEntry& self) { return self.replays.total(); })
      .def_property_readonly("bytes", &PlanEntry::bytes)
      .def_property_readonly("steps", [](const PlanEntry& self) { return self.plan->text(); });

  py::class_<PlanTable, std::shared_ptr<PlanTable>>(core, "PlanTable")
      .def(py::init([](size_t plans, uint64_t free_recordings, uint64_t replays_per_recording,
                       uint32_t refusals) {
             return std::make_shared<PlanTable>(
                 PlanLimits{plans, free_recordings, replays_per_recording, refusals});
           }),
           py::arg("plans"), py::arg("free_recordings"), py::arg("replays_per_recording"),
           py::arg("refusals"))
      .def("install",
           [](PlanTable& self, const PlanKey& key, std::shared_ptr<Plan> plan, std::string label,
              uint64_t generation) {
             return self.install(key, std::move(plan), std::move(label), generation);
           })
      .def("refuse", &PlanTable::refuse)
      .def("drop", &PlanTable::drop, py::arg("key"), py::call_guard<py::gil_scoped_release>(),
           "Take a plan out, as a replay that failed does: without the GIL.")
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
      .def("is_ready", &PlanTable::is_ready, py::arg("key"))
      .def("set_ready", &PlanTable::set_ready, py::arg("key"))
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
          "Whether a tvm-ffi function is being called, which gets its arguments converted.")
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
      .def("ffi_call", &call_spied, py::arg("handle"), py::arg("tensors"), py::arg("call"),
           "Runs `call`, in which the function at `ffi_spy()` stands for that of the handle.");

  core.def(
      "ffi_spy", [] { return reinterpret_cast<uint64_t>(&spied_call); },
      "The address of a tvm-ffi function that records and hands on; see `Recorder.ffi_call`.");
  core.def("current_recorder", &Recorder::current, py::return_value_policy::reference,
           "What records this thread; None where nothing does.");
  core.def("cuda_parameter_sizes", &cuda_parameter_sizes, py::arg("function"),
           "The sizes of a CUfunction's parameters; empty where the driver cannot tell.");
  core.def("watch_launch_hooks", &watch_launch_hooks, py::arg("lists"), py::arg("holders"),
           py::arg("changed"));
}

}  // namespace opgraft
