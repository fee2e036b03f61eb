// The bindings of the compiled core. TORCH_EXTENSION_NAME, which the build defines, names the torch
// that this is for: _C_torch2_13.

#include <ATen/ops/add.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <pthread.h>

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

#include "condition.h"
#include "counter.h"
#include "derivative.h"
#include "epochs.h"
#include "observer.h"
#include "opaque.h"
#include "plan_impl.h"
#include "plan_recorder.h"
#include "python_impl.h"
#include "router.h"
#include "shadow.h"
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

// Which torch the headers are of, exactly: `torch.__version__` and `torch.version.git_version`,
// which the build finds beside them.
py::tuple torch_build() { return py::make_tuple(OPGRAFT_TORCH_VERSION, OPGRAFT_TORCH_COMMIT); }

py::dict abi_facts() {
  py::dict facts;
#if defined(_GLIBCXX_USE_CXX11_ABI)
  facts["cxx11_abi"] = _GLIBCXX_USE_CXX11_ABI != 0;
#else
  facts["cxx11_abi"] = true;  // another standard library: there is only one
#endif
  facts["cplusplus"] = static_cast<long>(__cplusplus);
  facts["compiler"] = __VERSION__;
  return facts;
}

// --------------------------------------------------------------------------- conditions

using PlaceTuple = std::tuple<int32_t, int32_t, bool>;

Place to_place(const PlaceTuple& place) {
  return Place{std::get<0>(place), std::get<1>(place), std::get<2>(place)};
}

// What `opgraft.when.compilation` makes: (code, place, integer, real, constant, children, places).
using NodeTuple = std::tuple<std::string, PlaceTuple, int64_t, double, py::object,
                             std::vector<int32_t>, std::vector<PlaceTuple>>;

Code to_code(const std::string& name) {
  static const std::vector<std::pair<const char*, Code>> codes = {
      {"integer", Code::Integer},
      {"real", Code::Real},
      {"ndim", Code::Ndim},
      {"size", Code::Size},
      {"stride", Code::Stride},
      {"numel", Code::Numel},
      {"device_capability", Code::Capability},
      {"length", Code::Length},
      {"item", Code::Item},
      {"value", Code::Value},
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
      {"same_value", Code::SameValue},
      {"other_value", Code::OtherValue},
      {"dtype", Code::Dtype},
      {"is_contiguous", Code::Contiguous},
      {"aligned", Code::Aligned},
      {"requires_grad", Code::RequiresGrad},
      {"same_dtype", Code::SameDtype},
      {"same_device", Code::SameDevice},
      {"is_none", Code::IsNone},
      {"all", Code::All},
      {"any", Code::Any},
      {"not", Code::Not},
  };
  for (const auto& [known, code] : codes) {
    if (name == known) return code;
  }
  throw py::value_error("no such node in a condition: " + name);
}

// dtypes, layouts and memory formats are numbers on the stack.
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

Condition to_condition(const std::vector<NodeTuple>& tuples) {
  std::vector<Node> nodes;
  for (const auto& [code, place, integer, real, constant, children, places] : tuples) {
    Node node;
    node.code = to_code(code);
    node.place = to_place(place);
    node.integer = integer;
    node.real = real;
    if (node.code == Code::Dtype) {
      node.integer = static_cast<int64_t>(dtype_set(constant));
    } else if (node.code == Code::Contiguous) {
      node.integer = to_constant(constant).toInt();
    } else {
      node.constant = to_constant(constant);
    }
    node.children = children;
    for (const auto& each : places) node.places.push_back(to_place(each));
    nodes.push_back(std::move(node));
  }
  const auto root = static_cast<int32_t>(nodes.size()) - 1;
  return Condition(std::move(nodes), root);
}

// Kept for good: a lookup may come from any thread, and at any time.
py::handle capability_function;

int64_t look_capability_up(c10::DeviceIndex index) {
  const PythonAccess python;
  if (!python) return kUnknownCapability;
  return call_python(capability_function, py::int_(static_cast<int>(index))).cast<int64_t>();
}

// --------------------------------------------------------------------------- routers

// A router with what its overrides share in Python.
struct RouterHandle {
  std::shared_ptr<Router> router;
  std::shared_ptr<const Signature> signature;
  PythonObserver* observer;  // the router's, which is kept for good
  std::shared_ptr<const PythonHooks> hooks;
};

RouterHandle install(const std::string& name, const std::string& overload, const std::string& key) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  auto signature = std::make_shared<const Signature>(op.schema());
  auto owned = std::make_unique<PythonObserver>(signature);
  auto* observer = owned.get();
  auto router = Router::install(name, overload, key, std::move(owned));
  return {std::move(router), std::move(signature), observer, nullptr};
}

void set_hooks(RouterHandle& self, py::object takes, py::object first, py::object recover,
               py::object capturing, py::object error, py::object observe, py::object decompose) {
  auto hooks = std::make_shared<PythonHooks>();
  hooks->takes = PythonRef(std::move(takes));
  hooks->first = PythonRef(std::move(first));
  hooks->recover = PythonRef(std::move(recover));
  hooks->capturing = PythonRef(std::move(capturing));
  hooks->error = PythonRef(std::move(error));
  self.hooks = std::move(hooks);
  self.observer->set(PythonRef(std::move(observe)));
  self.observer->set_decompose(PythonRef(std::move(decompose)));
}

// What stands in a chain for overrides that `arrived` registers; it returns whether they are there.
std::shared_ptr<Override> make_placeholder(py::object arrived) {
  auto override = std::make_shared<Override>();
  override->misses = std::make_shared<Counter>();  // of calls that no override may take
  override->impl = std::make_unique<Placeholder>(std::move(arrived));
  override->is_placeholder = true;
  override->asks.store(true);
  return override;
}

bool quarantine(Override& self, const RouterHandle& router, const py::tuple& values) {
  torch::jit::Stack stack;
  router.signature->push_arguments(values, stack);
  return self.impl->quarantine(
      {router.router->op(), c10::DispatchKeySet(), stack, router.router->arguments()});
}

std::shared_ptr<Override> make_shadowed(std::shared_ptr<Override> inner, const RouterHandle& router,
                                        py::object override, py::object begin, py::object end,
                                        double rate) {
  ShadowImpl::Options options;
  options.inner = std::move(inner);
  options.signature = router.signature;
  options.override = PythonRef(std::move(override));
  options.begin = PythonRef(std::move(begin));
  options.end = PythonRef(std::move(end));
  options.rate = rate;
  return shadowed(std::move(options));
}

py::object call_native(const RouterHandle& handle, c10::DispatchKeySet keyset,
                       const py::tuple& values) {
  torch::jit::Stack stack;
  handle.signature->push_arguments(values, stack);
  {
    const py::gil_scoped_release release;
    handle.router->native(keyset).call(handle.router->op(), keyset, &stack);
  }
  return handle.signature->pop_results(stack);
}

// --------------------------------------------------------------------------- launch plans

void set_plans(Override& self, const RouterHandle& router, py::object override,
               std::shared_ptr<PlanTable> table, py::object record, py::object ask,
               const std::optional<std::vector<NodeTuple>>& unplanned, bool takes_keyset,
               bool writes) {
  PlannedImpl::Options options;
  options.table = std::move(table);
  options.signature = router.signature;
  options.override = PythonRef(std::move(override));
  options.record = PythonRef(std::move(record));
  options.ask = PythonRef(std::move(ask));
  options.capturing = PythonRef(py::reinterpret_borrow<py::object>(router.hooks->capturing.get()));
  if (unplanned) options.unplanned.emplace(to_condition(*unplanned));
  options.takes_keyset = takes_keyset;
  options.writes = writes;
  self.has_plans = &options.table->has_plans();
  self.impl = std::make_unique<PlannedImpl>(std::move(self.impl), std::move(options));
}

std::shared_ptr<Recorder> make_recorder(const RouterHandle& router, const py::tuple& values,
                                        c10::Device device) {
  torch::jit::Stack arguments;
  router.signature->push_arguments(values, arguments);
  return std::make_shared<Recorder>(router.router->op().schema(), std::move(arguments), device);
}

// The plan of what was recorded; None where something was refused. `keep` lives as long as it does.
std::shared_ptr<Plan> finish_recording(const RouterHandle& router, Recorder& recorder,
                                       const py::object& result, py::object keep) {
  const auto results = router.signature->to_results(result, "a recorded impl");
  return std::const_pointer_cast<Plan>(recorder.finish(results, PythonRef(std::move(keep))));
}

py::object replay_plan(const RouterHandle& router, const Plan& plan, const py::tuple& values,
                       std::optional<uint8_t> poison) {
  torch::jit::Stack stack;
  router.signature->push_arguments(values, stack);
  torch::jit::Stack results;
  {
    const py::gil_scoped_release release;
    const AsAKernel as_a_kernel(router.router->excluded());
    plan.replay(view(stack).data(), results, poison);
  }
  return router.signature->pop_results(results);
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

// `opgraft.native(op)` on this thread, for the length of a `with`.
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

// This thread reads what routers route to, as in the middle of a call, for the length of a `with`.
class Reading {
 public:
  void enter() { reader_.emplace(); }
  void exit(const py::args&) { reader_.reset(); }

 private:
  std::optional<Epochs::Reader> reader_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, core) {
  mind_forks();
  core.doc() = "opgraft's compiled core: routers, conditions, native-kernel capture.";
  core.def("torch_version", &torch_version,
           "The release of the torch headers it was compiled against.");
  core.def("torch_build", &torch_build, "The version and the commit of that torch.");
  core.def("abi", &abi_facts,
           "What it was compiled as: `cxx11_abi` must be the running torch's; the rest informs.");

  py::class_<Counter, std::shared_ptr<Counter>>(core, "Counter")
      .def(py::init<>())
      .def("add", [](Counter& self) { self.add(); })
      .def("total", &Counter::total);

  bind_plans(core);

  py::class_<Override, std::shared_ptr<Override>>(core, "Override")
      .def(py::init(&make_override), py::arg("identity"), py::arg("hits"), py::arg("misses"),
           py::arg("fallbacks"))
      .def_static("placeholder", &make_placeholder, py::arg("arrived"),
                  "Stands for overrides that `arrived()` registers, once a call comes by.")
      .def(
          "set_condition",
          [](Override& self, const std::vector<NodeTuple>& nodes) {
            self.condition = to_condition(nodes);
          },
          "Give it a compiled condition; without one it takes every call.")
      .def(
          "ask_python", [](Override& self) { self.asks.store(true); },
          "From now on Python decides whether it takes a call.")
      .def(
          "set_python_impl",
          [](Override& self, const RouterHandle& router, py::object override, py::object function,
             bool takes_keyset, bool falls_back, uint32_t checked_hits, std::string who) {
            self.impl = std::make_unique<PythonImpl>(
                std::move(override), std::move(function), takes_keyset, falls_back, checked_hits,
                router.signature, router.hooks, std::move(who));
          },
          py::arg("router"), py::arg("override"), py::arg("function"), py::arg("takes_keyset"),
          py::arg("falls_back"), py::arg("checked_hits"), py::arg("who"))
      .def(
          "set_boxed_impl",
          [](Override& self, const py::capsule& function) {
            self.impl = std::make_unique<BoxedImpl>(
                reinterpret_cast<BoxedImpl::Function>(function.get_pointer()));
          },
          "An impl in C++: a capsule of a `BoxedImpl::Function`.")
      .def("quarantine", &quarantine, py::arg("router"), py::arg("values"),
           "Keep it from calls of the kind of these values; false: it cannot tell kinds apart.")
      .def("shadowed", &make_shadowed, py::arg("router"), py::arg("override"), py::arg("begin"),
           py::arg("end"), py::arg("rate"),
           "The same override, a share of whose hits is compared with the native kernel.")
      .def("set_plans", &set_plans, py::arg("router"), py::arg("override"), py::arg("table"),
           py::arg("record"), py::arg("ask"), py::arg("unplanned"), py::arg("takes_keyset"),
           py::arg("writes"), "Let its impl be recorded and replayed.");

  py::class_<RouterHandle>(core, "Router")
      .def(py::init(&install), py::arg("name"), py::arg("overload"), py::arg("dispatch_key"))
      .def("set_hooks", &set_hooks, py::arg("takes"), py::arg("first"), py::arg("recover"),
           py::arg("capturing"), py::arg("error"), py::arg("observe"), py::arg("decompose"),
           "What its overrides ask in Python; before the first of them is made.")
      .def("publish",
           [](const RouterHandle& self, const std::vector<std::shared_ptr<Override>>& chain) {
             self.router->publish(Chain(chain.begin(), chain.end()));
           })
      .def("call_native", &call_native, py::arg("keyset"), py::arg("values"))
      .def("recorder", &make_recorder, py::arg("values"), py::arg("device"))
      .def("finish", &finish_recording, py::arg("recorder"), py::arg("result"), py::arg("keep"))
      .def("replay", &replay_plan, py::arg("plan"), py::arg("values"), py::arg("poison"))
      .def_property_readonly(
          "native_origin", [](const RouterHandle& self) { return self.router->native().origin(); })
      .def_property_readonly("is_composite",
                             [](const RouterHandle& self) { return self.router->is_composite(); })
      .def_property_readonly(
          "excluded", [](const RouterHandle& self) { return self.router->excluded(); },
          "The dispatch keys that an impl's own calls do not pass.")
      .def_property_readonly(
          "is_typed", [](const RouterHandle& self) { return self.router->is_typed(); },
          "Whether calls in C++ come without being boxed.");

  py::class_<Scope>(core, "Scope")
      .def(py::init([](const std::optional<py::dict>& off, py::object tag) {
             return std::make_unique<Scope>(
                 off ? std::optional<Selector>(to_selector(*off)) : std::nullopt,
                 std::make_shared<const PythonRef>(std::move(tag)));
           }),
           py::arg("off"), py::arg("tag"),
           "What is off inside; None: nothing, and every router tells its observer of its calls.")
      .def("__enter__", &Scope::enter)
      .def("__exit__", [](Scope& self, const py::args&) { self.exit(); })
      .def_static(
          "tags", &scope_tags, py::arg("observing"),
          "Of the scopes that this thread is in, outermost first: of those that observe, or of "
          "those in which something is off.")
      .def_static(
          "is_off", [](const py::dict& identity) { return Scope::is_off(to_selector(identity)); },
          "Whether a scope on this thread switches off the override of this identity.");

  py::class_<Bypass>(core, "Bypass")
      .def(py::init<std::string>())
      .def("__enter__", &Bypass::enter)
      .def("__exit__", &Bypass::exit);

  py::class_<Derivative, std::shared_ptr<Derivative>>(core, "Derivative")
      .def(py::init(&Derivative::install), py::arg("name"), py::arg("overload"),
           py::arg("dispatch_key"))
      .def("set_hook", &Derivative::set_hook)
      .def("publish",
           [](Derivative& self, const std::vector<std::optional<std::vector<NodeTuple>>>& all) {
             Derivative::Conditions conditions;
             for (const auto& nodes : all) {
               conditions.push_back(nodes ? std::optional(to_condition(*nodes)) : std::nullopt);
             }
             self.publish(std::move(conditions));
           });

  core.def("stand_for", &stand_for, py::arg("name"), py::arg("overload"), py::arg("origin"),
           py::arg("origin_overload"),
           "Lets an op that was defined without kernels run another op's, which has its schema.");

  core.def(
      "holds",
      [](const std::vector<NodeTuple>& nodes, const py::tuple& values, const std::string& name,
         const std::string& overload) {
        const auto op =
            c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
        torch::jit::Stack stack;
        Signature(op.schema()).push_arguments(values, stack);
        return to_condition(nodes).holds(view(stack).data());
      },
      py::arg("nodes"), py::arg("values"), py::arg("name"), py::arg("overload"),
      "Evaluates a compiled condition on an op's arguments, as the router would.");
  core.def(
      "show_whole_ops_to",
      [](const py::type& mode) { show_whole_ops_to(py::type(mode).release().ptr()); },
      "Dispatch modes of this type see composite ops whole, and not what they are made of.");
  core.def("set_capability_lookup", [](py::object function) {
    capability_function = function.release();
    set_capability_lookup(&look_capability_up);
  });
  core.def("shut_down", &Router::shut_down, py::call_guard<py::gil_scoped_release>(),
           "From now on every call is a miss; waits for calls that are in Python.");
  core.attr("ORIGIN") = kOrigin;

  py::class_<Reading>(core, "Reading", "For tests: this thread is in the middle of a call.")
      .def(py::init<>())
      .def("__enter__", &Reading::enter)
      .def("__exit__", &Reading::exit);
}
