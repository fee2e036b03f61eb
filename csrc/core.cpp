// The bindings of the compiled core. The build defines TORCH_EXTENSION_NAME, which contains the
// torch version: _C_torch2_13.

#include <ATen/ops/add.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <chrono>
#include <ctime>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "backward_op.h"
#include "condition.h"
#include "counter.h"
#include "derivative.h"
#include "epochs.h"
#include "filling.h"
#include "observer.h"
#include "opaque.h"
#include "outdated.h"
#include "plan_impl.h"
#include "plan_recorder.h"
#include "python_impl.h"
#include "router.h"
#include "shadow.h"
#include "tensors.h"
#include "threads.h"
#include "torch_private.h"
#include "torch_python.h"

namespace {

using namespace opgraft;

// "2.13.0": the release of the headers, without the local part ("+cpu") that torch.__version__
// carries.
std::string torch_version() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
         std::to_string(TORCH_VERSION_PATCH);
}

// The exact torch build of the headers: `torch.__version__` and `torch.version.git_version`, which
// the build reads beside the headers.
py::tuple torch_build() { return py::make_tuple(OPGRAFT_TORCH_VERSION, OPGRAFT_TORCH_COMMIT); }

py::dict abi_facts() {
  py::dict facts;
#if defined(_GLIBCXX_USE_CXX11_ABI)
  facts["cxx11_abi"] = _GLIBCXX_USE_CXX11_ABI != 0;
#else
  facts["cxx11_abi"] = true;  // another standard library, which has only one ABI
#endif
  facts["cplusplus"] = static_cast<long>(__cplusplus);
  facts["compiler"] = __VERSION__;
  return facts;
}

// A device guard for CUDA that asks no driver: there is one device, and it is the current one.
struct CudaGuardWithoutDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Stream getStream(c10::Device) const noexcept override { return default_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return default_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return default_stream(); }

 private:
  c10::Stream default_stream() const {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0));
  }
};

void guard_cuda_without_device() {
  static const CudaGuardWithoutDevice guard;
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
}

// The kernel would kill this process alone, and the compilers that it runs would stay behind. A
// handler in Python would wait for the interpreter, which may hang.
void end_group_with_parent() {
#ifdef __linux__
  if (getpgrp() != getpid()) return;  // it is another process's group
  struct sigaction action{};
  action.sa_handler = [](int) {
    kill(0, SIGKILL);
  };
  if (sigaction(SIGHUP, &action, nullptr) == 0) prctl(PR_SET_PDEATHSIG, SIGHUP);
#endif
}

// --------------------------------------------------------------------------- conditions

using ArgumentRefTuple = std::tuple<int32_t, int32_t, bool>;

ArgumentRef to_argument_ref(const ArgumentRefTuple& fields) {
  return ArgumentRef{std::get<0>(fields), std::get<1>(fields), std::get<2>(fields)};
}

// A `Node` of `opgraft.when.compilation`: (code, argument_ref, integer, real, constant, children,
// argument_refs).
using NodeTuple = std::tuple<std::string, ArgumentRefTuple, int64_t, double, py::object,
                             std::vector<int32_t>, std::vector<ArgumentRefTuple>>;

Code to_code(const std::string& name) {
  static const std::vector<std::pair<const char*, Code>> codes = {
      {"integer", Code::Integer},
      {"real", Code::Real},
      {"ndim", Code::Ndim},
      {"size", Code::Size},
      {"stride", Code::Stride},
      {"numel", Code::Numel},
      {"itemsize", Code::Itemsize},
      {"device_capability", Code::Capability},
      {"length", Code::Length},
      {"item", Code::Item},
      {"value", Code::Value},
      {"dtype_of", Code::DtypeOf},
      {"+", Code::Add},
      {"-", Code::Subtract},
      {"*", Code::Multiply},
      {"//", Code::FloorDivide},
      {"%", Code::Modulo},
      {"<", Code::Less},
      {"<=", Code::LessEqual},
      {"==", Code::Equal},
      {"!=", Code::NotEqual},
      {">=", Code::GreaterEqual},
      {">", Code::Greater},
      {"value_is", Code::ValueIs},
      {"value_is_not", Code::ValueIsNot},
      {"dtype", Code::Dtype},
      {"is_contiguous", Code::Contiguous},
      {"aligned", Code::Aligned},
      {"requires_grad", Code::RequiresGrad},
      {"same_dtype", Code::SameDtype},
      {"same_device", Code::SameDevice},
      {"is_none", Code::IsNone},
      {"lookup", Code::Lookup},
      {"all", Code::All},
      {"any", Code::Any},
      {"not", Code::Not},
  };
  for (const auto& [known, code] : codes) {
    if (name == known) return code;
  }
  throw py::value_error("no such node in a condition: " + name);
}

// On the stack, dtypes, layouts and memory formats are integers.
c10::IValue to_constant(const py::object& constant) {
  if (constant.is_none()) return {};
  if (THPDtype_Check(constant.ptr())) {
    return static_cast<int64_t>(reinterpret_cast<THPDtype*>(constant.ptr())->scalar_type);
  }
  if (THPLayout_Check(constant.ptr())) {
    return static_cast<int64_t>(reinterpret_cast<THPLayout*>(constant.ptr())->layout);
  }
  if (THPMemoryFormat_Check(constant.ptr())) {
    return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(constant.ptr())->memory_format);
  }
  if (py::isinstance<py::str>(constant)) return constant.cast<std::string>();
  if (py::isinstance<py::int_>(constant)) return constant.cast<int64_t>();
  return constant.cast<c10::Device>();
}

uint64_t dtype_set(const py::iterable& dtypes) {
  uint64_t set = 0;
  for (const auto& dtype : dtypes) {
    set |= uint64_t{1} << to_constant(py::reinterpret_borrow<py::object>(dtype)).toInt();
  }
  return set;
}

// An axis of `opgraft.when.grid.Grid.compiled`: (exact numbers or None, shift, first, count,
// whether it is open-ended).
using AxisTuple = std::tuple<std::optional<std::vector<py::object>>, int, int64_t, int64_t, bool>;

// `features`: how many axes it has.
std::unique_ptr<const Grid> to_grid(const py::object& compiled, size_t features) {
  if (compiled.is_none()) return std::make_unique<const Grid>();
  const auto [tuples, cells] = compiled.cast<std::pair<std::vector<AxisTuple>, std::string>>();
  TORCH_CHECK(tuples.size() == features, "a grid has an axis for each feature");
  std::vector<Grid::Axis> axes;
  for (const auto& [numbers, shift, first, count, open_ended] : tuples) {
    Grid::Axis axis{std::nullopt, shift, first, count, open_ended};
    if (numbers) {
      axis.numbers.emplace();
      for (const auto& number : *numbers) axis.numbers->push_back(to_constant(number).toInt());
    }
    axes.push_back(std::move(axis));
  }
  return std::make_unique<const Grid>(axes, cells);
}

// `constant`: (how many features it has, the column, a function from a device to a compiled grid,
// which is None if there is none).
std::shared_ptr<const Lookup> to_lookup(const py::object& constant) {
  auto [features, column, function] = constant.cast<std::tuple<size_t, int, py::object>>();
  auto held = std::make_shared<PythonRef>(std::move(function));
  auto source = [held, features](c10::Device device) -> std::unique_ptr<const Grid> {
    const PythonAccess python;
    if (!python) return nullptr;
    return to_grid(call_python(held->get(), py::cast(device)), features);
  };
  return std::make_shared<const Lookup>(std::move(source), column);
}

Condition to_condition(const std::vector<NodeTuple>& tuples) {
  std::vector<Node> nodes;
  for (const auto& [code, argument_ref, integer, real, constant, children, argument_refs] :
       tuples) {
    Node node;
    node.code = to_code(code);
    node.argument_ref = to_argument_ref(argument_ref);
    node.integer = integer;
    node.real = real;
    if (node.code == Code::Dtype) {
      node.integer = static_cast<int64_t>(dtype_set(constant));
    } else if (node.code == Code::Contiguous) {
      node.integer = to_constant(constant).toInt();
    } else if (node.code == Code::Lookup) {
      node.lookup = to_lookup(constant);
    } else {
      node.constant = to_constant(constant);
    }
    node.children = children;
    for (const auto& each : argument_refs) node.argument_refs.push_back(to_argument_ref(each));
    nodes.push_back(std::move(node));
  }
  const auto root = static_cast<int32_t>(nodes.size()) - 1;
  return Condition(std::move(nodes), root);
}

// Never released: any thread may look up a capability at any time.
py::handle capability_function;

int64_t look_up_capability(c10::DeviceIndex index) {
  const PythonAccess python;
  if (!python) return kUnknownCapability;
  return call_python(capability_function, py::int_(static_cast<int>(index))).cast<int64_t>();
}

// --------------------------------------------------------------------------- routers

// A router, and what its overrides in Python share.
struct RouterHandle {
  std::shared_ptr<Router> router;
  std::shared_ptr<const PythonConverter> converter;
  PythonObserver* observer;  // owned by the router, which is never destroyed
  std::shared_ptr<const PythonHooks> hooks;
};

RouterHandle install(const std::string& name, const std::string& overload, const std::string& key) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  auto converter = std::make_shared<const PythonConverter>(op.schema());
  auto owned = std::make_unique<PythonObserver>(converter);
  auto* observer = owned.get();
  auto router = Router::install(name, overload, key, std::move(owned));
  return {std::move(router), std::move(converter), observer, nullptr};
}

void set_hooks(RouterHandle& self, py::object takes, py::object first_hit, py::object recover,
               py::object is_capturing, py::object warn_captured, py::object contract_error,
               py::object observe, py::object decompose) {
  auto hooks = std::make_shared<PythonHooks>();
  hooks->takes = PythonRef(std::move(takes));
  hooks->first_hit = PythonRef(std::move(first_hit));
  hooks->recover = PythonRef(std::move(recover));
  hooks->is_capturing = PythonRef(std::move(is_capturing));
  hooks->warn_captured = PythonRef(std::move(warn_captured));
  hooks->contract_error = PythonRef(std::move(contract_error));
  self.hooks = std::move(hooks);
  self.observer->set(PythonRef(std::move(observe)));
  self.observer->set_decompose(PythonRef(std::move(decompose)));
}

// An override that stands in a chain for deferred ones. `register_overrides` registers those, and
// returns whether they are in the chain.
std::shared_ptr<Override> make_placeholder(py::object register_overrides) {
  auto override = std::make_shared<Override>();
  override->misses = std::make_shared<Counter>();  // counts calls that no override may take
  override->impl = std::make_unique<Placeholder>(std::move(register_overrides));
  override->is_placeholder = true;
  override->decides_in_python.store(true);
  return override;
}

bool quarantine(Override& self, const RouterHandle& router, const py::tuple& values) {
  torch::jit::Stack stack;
  router.converter->push_arguments(values, stack);
  return self.impl->quarantine(
      {router.router->op(), c10::DispatchKeySet(), stack, router.router->argument_count()});
}

std::shared_ptr<Override> make_shadowed(std::shared_ptr<Override> inner, const RouterHandle& router,
                                        py::object override, py::object begin, py::object end,
                                        double rate) {
  ShadowImpl::Options options;
  options.inner = std::move(inner);
  options.converter = router.converter;
  options.override = PythonRef(std::move(override));
  options.begin = PythonRef(std::move(begin));
  options.end = PythonRef(std::move(end));
  options.rate = rate;
  return shadowed(std::move(options));
}

py::object call_native(const RouterHandle& handle, c10::DispatchKeySet keyset,
                       const py::tuple& values) {
  torch::jit::Stack stack;
  handle.converter->push_arguments(values, stack);
  {
    const py::gil_scoped_release release;
    handle.router->check_op_exists();
    handle.router->native(keyset).call(handle.router->op(), keyset, &stack);
  }
  return handle.converter->pop_results(stack);
}

// --------------------------------------------------------------------------- launch plans

void set_plans(Override& self, const RouterHandle& router, py::object override,
               std::shared_ptr<PlanTable> table, py::object record, py::object ask,
               const std::optional<std::vector<NodeTuple>>& unplanned,
               const std::optional<std::vector<NodeTuple>>& without_random_numbers,
               bool takes_keyset, bool writes) {
  PlannedImpl::Options options;
  options.table = std::move(table);
  options.converter = router.converter;
  options.override = PythonRef(std::move(override));
  options.record = PythonRef(std::move(record));
  options.ask = PythonRef(std::move(ask));
  options.is_capturing =
      PythonRef(py::reinterpret_borrow<py::object>(router.hooks->is_capturing.get()));
  if (unplanned) options.unplanned.emplace(to_condition(*unplanned));
  if (without_random_numbers) {
    options.without_random_numbers.emplace(to_condition(*without_random_numbers));
  }
  options.takes_keyset = takes_keyset;
  options.writes = writes;
  self.has_plans = &options.table->has_plans();
  self.impl = std::make_unique<PlannedImpl>(std::move(self.impl), std::move(options));
}

std::shared_ptr<Recorder> make_recorder(const RouterHandle& router, const py::tuple& values,
                                        c10::Device device) {
  torch::jit::Stack arguments;
  router.converter->push_arguments(values, arguments);
  return std::make_shared<Recorder>(router.router->op().schema(), std::move(arguments), device);
}

// The plan of a recording; None if it was refused. `keep_alive` lives as long as the plan.
std::shared_ptr<Plan> finish_recording(const RouterHandle& router, Recorder& recorder,
                                       const py::object& result, py::object keep_alive) {
  const auto results = router.converter->to_results(result, "a recorded impl");
  return std::const_pointer_cast<Plan>(recorder.finish(results, PythonRef(std::move(keep_alive))));
}

py::object replay_plan(const RouterHandle& router, const Plan& plan, const py::tuple& values,
                       std::optional<uint8_t> poison) {
  torch::jit::Stack stack;
  router.converter->push_arguments(values, stack);
  torch::jit::Stack results;
  {
    const py::gil_scoped_release release;
    const ExcludeKeys exclude(router.router->excluded());
    plan.replay(view(stack).data(), results, poison);
  }
  return router.converter->pop_results(results);
}

Selector to_selector(const py::dict& fields) {
  const auto get = [&fields](const char* key) -> std::optional<std::string> {
    if (!fields.contains(key) || fields[key].is_none()) return std::nullopt;
    return fields[key].cast<std::string>();
  };
  return {get("dsl"), get("op"), get("dispatch_key"), get("pack"), get("name")};
}

std::shared_ptr<Override> make_override(const py::dict& identity, std::shared_ptr<Counter> hits,
                                        std::shared_ptr<Counter> misses,
                                        std::shared_ptr<Counter> fallbacks) {
  auto override = std::make_shared<Override>();
  override->identity = to_selector(identity);
  override->hits = std::move(hits);
  override->misses = std::move(misses);
  override->fallbacks = std::move(fallbacks);
  const auto& of = override->identity;
  override->label = "opgraft: " + of.name.value_or("") + " [" + of.op.value_or("") +
                    (of.dsl ? ", " + *of.dsl : "") + "]";
  return override;
}

// --------------------------------------------------------------------------- context managers

// `opgraft.native(op)` on this thread, as a context manager.
class Bypass {
 public:
  explicit Bypass(std::string op) : op_(std::move(op)) {}
  void enter() { frame_ = std::make_unique<Frame>(op_); }
  void exit(const py::args&) { frame_.reset(); }

 private:
  std::string op_;
  std::unique_ptr<Frame> frame_;
};

py::list scope_tags(bool observing) {
  py::list tags;
  for (const auto& tag : Scope::tags(observing)) {
    tags.append(static_cast<const PythonRef*>(tag.get())->get());
  }
  return tags;
}

// --------------------------------------------------------------------------- for tests

// A context manager in which this thread holds an `Epochs::Reader`, as during a call.
class Reading {
 public:
  void enter() { reader_.emplace(); }
  void exit(const py::args&) { reader_.reset(); }

 private:
  std::optional<Epochs::Reader> reader_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, core) {
  install_fork_handlers();
  core.doc() = "opgraft's compiled core: routers, conditions, native-kernel capture.";
  core.def("torch_version", &torch_version,
           "The release of the torch headers it was compiled against.");
  core.def("torch_build", &torch_build, "The version and the commit of that torch.");
  core.def(
      "abi", &abi_facts,
      "How it was compiled. `cxx11_abi` must be the running torch's; the rest is information.");

  py::class_<Counter, std::shared_ptr<Counter>>(core, "Counter")
      .def(py::init<>())
      .def("add", [](Counter& self) { self.add(); })
      .def("total", &Counter::total);

  bind_plans(core);

  py::class_<Override, std::shared_ptr<Override>>(core, "Override")
      .def(py::init(&make_override), py::arg("identity"), py::arg("hits"), py::arg("misses"),
           py::arg("fallbacks"))
      .def_static(
          "placeholder", &make_placeholder, py::arg("register_overrides"),
          "Stands for overrides that `register_overrides()` registers, once a call comes by.")
      .def(
          "set_condition",
          [](Override& self, const std::vector<NodeTuple>& nodes) {
            self.condition = to_condition(nodes);
          },
          "Set its compiled condition. Without one it takes every call.")
      .def(
          "decide_in_python", [](Override& self) { self.decides_in_python.store(true); },
          "Let Python decide from now on whether it takes a call.")
      .def_readwrite("is_differentiated", &Override::is_differentiated,
                     "Whether autograd differentiates the ops that its impl calls.")
      .def_readwrite("has_functions", &Override::has_functions,
                     "Whether two functions differentiate it.")
      .def(
          "set_python_impl",
          [](Override& self, const RouterHandle& router, py::object override, py::object function,
             bool takes_keyset, bool falls_back, uint32_t checked_hits, std::string display_name) {
            self.impl = std::make_unique<PythonImpl>(
                std::move(override), std::move(function), takes_keyset, falls_back, checked_hits,
                router.converter, router.hooks, std::move(display_name));
          },
          py::arg("router"), py::arg("override"), py::arg("function"), py::arg("takes_keyset"),
          py::arg("falls_back"), py::arg("checked_hits"), py::arg("display_name"))
      .def(
          "set_boxed_impl",
          [](Override& self, const py::capsule& function) {
            self.impl = std::make_unique<BoxedImpl>(
                reinterpret_cast<BoxedImpl::Function>(function.get_pointer()));
          },
          "An impl in C++: a capsule of a `BoxedImpl::Function`.")
      .def("quarantine", &quarantine, py::arg("router"), py::arg("values"),
           "Quarantine it for the kind of a call; false if it does not know kinds.")
      .def("shadowed", &make_shadowed, py::arg("router"), py::arg("override"), py::arg("begin"),
           py::arg("end"), py::arg("rate"),
           "A copy of the override that compares a fraction of its hits with native.")
      .def("set_plans", &set_plans, py::arg("router"), py::arg("override"), py::arg("table"),
           py::arg("record"), py::arg("ask"), py::arg("unplanned"),
           py::arg("without_random_numbers"), py::arg("takes_keyset"), py::arg("writes"),
           "Record and replay launch plans of its impl.");

  py::class_<RouterHandle>(core, "Router")
      .def(py::init(&install), py::arg("name"), py::arg("overload"), py::arg("dispatch_key"))
      .def("set_hooks", &set_hooks, py::arg("takes"), py::arg("first_hit"), py::arg("recover"),
           py::arg("is_capturing"), py::arg("warn_captured"), py::arg("contract_error"),
           py::arg("observe"), py::arg("decompose"),
           "Set the Python functions that its overrides call, before the first override.")
      .def("publish",
           [](const RouterHandle& self, const std::vector<std::shared_ptr<Override>>& chain) {
             self.router->publish(Overrides(chain.begin(), chain.end()));
           })
      .def(
          "deregister", [](const RouterHandle& self) { self.router->deregister(); },
          py::call_guard<py::gil_scoped_release>(),
          "Take it off the dispatcher. Calls that are in it go on.")
      .def("call_native", &call_native, py::arg("keyset"), py::arg("values"))
      .def("recorder", &make_recorder, py::arg("values"), py::arg("device"))
      .def("finish", &finish_recording, py::arg("recorder"), py::arg("result"),
           py::arg("keep_alive"))
      .def("replay", &replay_plan, py::arg("plan"), py::arg("values"), py::arg("poison"))
      .def_property_readonly(
          "is_outdated", [](const RouterHandle& self) { return self.router->is_outdated(); },
          "Whether its op was destroyed after it was installed.")
      .def_property_readonly(
          "native_origin", [](const RouterHandle& self) { return self.router->native().origin(); })
      .def_property_readonly("is_composite",
                             [](const RouterHandle& self) { return self.router->is_composite(); })
      .def_property_readonly(
          "excluded", [](const RouterHandle& self) { return self.router->excluded(); },
          "The dispatch keys that are excluded while an impl runs.")
      .def_property_readonly(
          "has_own_kernel", [](const RouterHandle& self) { return self.router->has_own_kernel(); },
          "Whether the op had a kernel of its own at this key, not only one for all backends.")
      .def(
          "let_autocast_through", [](RouterHandle& self) { self.router->let_autocast_through(); },
          "Have impls see their callers' autocast. Not while there are overrides.")
      .def_property_readonly(
          "is_typed", [](const RouterHandle& self) { return self.router->is_typed(); },
          "Whether calls from C++ arrive unboxed.");

  py::class_<Scope>(core, "Scope")
      .def(py::init([](const std::optional<py::dict>& off, py::object tag) {
             return std::make_unique<Scope>(
                 off ? std::optional<Selector>(to_selector(*off)) : std::nullopt,
                 std::make_shared<const PythonRef>(std::move(tag)));
           }),
           py::arg("off"), py::arg("tag"),
           "`off`: what is off inside; None: nothing is, and routers tell observers of calls.")
      .def("__enter__", &Scope::enter)
      .def("__exit__", [](Scope& self, const py::args&) { self.exit(); })
      .def_static("tags", &scope_tags, py::arg("observing"),
                  "The tags of this thread's scopes, outermost first: of those that observe, or of "
                  "those that switch something off.")
      .def_static(
          "is_off", [](const py::dict& identity) { return Scope::is_off(to_selector(identity)); },
          "Whether a scope on this thread switches off the override with this identity.");

  py::class_<Bypass>(core, "Bypass")
      .def(py::init<std::string>())
      .def("__enter__", &Bypass::enter)
      .def("__exit__", &Bypass::exit);

  py::class_<Derivative, std::shared_ptr<Derivative>>(core, "Derivative")
      .def(py::init([](const RouterHandle& handle) { return Derivative::install(*handle.router); }),
           py::arg("router"))
      .def_static(
          "of_composite",
          [](const RouterHandle& handle, py::object hook) {
            auto derivative = std::make_shared<Derivative>(handle.router->op());
            derivative->set_hook(std::move(hook));  // before calls can find it
            handle.router->set_derivative(derivative);
            return derivative;
          },
          py::arg("router"), py::arg("hook"),
          "For a composite op, whose router is at the autograd key.")
      .def("set_hook", &Derivative::set_hook)
      .def("publish",
           [](Derivative& self, const std::vector<std::optional<std::vector<NodeTuple>>>& all) {
             Derivative::Conditions conditions;
             for (const auto& nodes : all) {
               conditions.push_back(nodes ? std::optional(to_condition(*nodes)) : std::nullopt);
             }
             self.publish(std::move(conditions));
           });

  core.def("register_backward", &register_backward, py::arg("name"), py::arg("overload"),
           py::arg("backward"), py::arg("backward_overload"),
           "Differentiate an op by another one, whose schema says what it gets and returns.");
  core.def(
      "has_tangent",
      [](const at::Tensor& tensor) { return has_tangent(*tensor.unsafeGetTensorImpl()); },
      py::arg("tensor"), "Whether a tensor has a forward-mode tangent.");
  core.def("forward_op", &forward_op, py::arg("name"), py::arg("overload"), py::arg("origin"),
           py::arg("origin_overload"),
           "Implements an op without kernels by forwarding to another op with its schema.");

  core.def(
      "holds",
      [](const std::vector<NodeTuple>& nodes, const py::tuple& values, const std::string& name,
         const std::string& overload) {
        const auto op =
            c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
        torch::jit::Stack stack;
        PythonConverter(op.schema()).push_arguments(values, stack);
        return to_condition(nodes).holds(view(stack).data());
      },
      py::arg("nodes"), py::arg("values"), py::arg("name"), py::arg("overload"),
      "Evaluates a compiled condition on an op's arguments, as the router would.");
  core.def(
      "register_tracing_mode",
      [](const py::type& mode) { register_tracing_mode(py::type(mode).release().ptr()); },
      "Let dispatch modes of this type see composite ops whole, not decomposed.");
  core.def(
      "fill_grid",
      [](const py::bytes& cells, const std::vector<std::pair<size_t, bool>>& axes) {
        std::vector<GridAxis> each;
        for (const auto& [count, has_steps] : axes) each.push_back({count, has_steps});
        return py::bytes(fill_grid(std::string(cells), each));
      },
      py::arg("cells"), py::arg("axes"),
      "Fill in a grid's undecided cells; an axis is its count, and whether it has steps.");
  core.def("set_capability_lookup", [](py::object function) {
    capability_function = function.release();
    set_capability_lookup(&look_up_capability);
  });
  core.def("set_withdraw", &set_withdraw_function, py::arg("function"),
           "`function(wait)` removes the overrides of outdated routers; wait: for locks.");
  core.def("shut_down", &Router::shut_down, py::call_guard<py::gil_scoped_release>(),
           "Make every call a miss from now on, and wait for calls that are in Python.");
  core.def("guard_cuda_without_device", &guard_cuda_without_device,
           "Let functions of tensors that guard their device, such as `contiguous`, take fake CUDA "
           "tensors in a process without a GPU; from now on.");
  core.def(
      "end_group_with_parent", &end_group_with_parent,
      "Have this process and those that it starts end when the thread that started it ends, if "
      "it leads a group of processes.");
  core.attr("ORIGIN") = kOrigin;

  py::class_<Reading>(core, "Reading",
                      "For tests: this thread is reading a chain, as during a call.")
      .def(py::init<>())
      .def("__enter__", &Reading::enter)
      .def("__exit__", &Reading::exit);
}
