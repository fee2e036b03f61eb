// What tests do in C++, beside the core: calls from threads that Python never saw, an impl, a
// kernel.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pthread.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;

// An impl in C++: the first argument plus one.
void plus_one(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto first = torch::jit::peek(*stack, 0, count).toTensor();
  torch::jit::drop(*stack, count);
  stack->emplace_back(at::add(first, 1));
}

// An op with the arguments of a call: tensors, and after them what else it takes.
std::pair<c10::OperatorHandle, torch::jit::Stack> call_of(const std::string& name,
                                                          const std::string& overload,
                                                          const std::vector<at::Tensor>& tensors,
                                                          const py::tuple& rest) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  torch::jit::Stack arguments(tensors.begin(), tensors.end());
  for (const auto& value : rest) {
    const auto& type = op.schema().arguments()[arguments.size()].type();
    arguments.push_back(torch::jit::toIValue(value, type));
  }
  return {std::move(op), std::move(arguments)};
}

// Whether a call of an op on another thread gets to its end while this one holds the GIL.
bool needs_no_gil(const std::string& name, const std::string& overload,
                  const std::vector<at::Tensor>& tensors, const py::tuple& rest) {
  const auto [op, arguments] = call_of(name, overload, tensors, rest);
  auto call =
      std::async(std::launch::async, [&op, stack = arguments]() mutable { op.callBoxed(&stack); });
  const bool done = call.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  const py::gil_scoped_release release;
  call.get();
  return done;
}

// Whether a thread that Python never saw, and that has called an op, ends while this one holds the
// GIL.
bool ends_without_gil(const std::string& name, const std::string& overload,
                      const std::vector<at::Tensor>& tensors, const py::tuple& rest) {
  const auto [op, arguments] = call_of(name, overload, tensors, rest);
  std::promise<void> called, may_end;
  std::function<void()> body = [&] {
    try {
      {
        auto stack = arguments;
        op.callBoxed(&stack);
      }  // its tensors are Python's, too
      called.set_value();
    } catch (...) {
      called.set_exception(std::current_exception());
    }
    may_end.get_future().wait();
  };
  pthread_t thread{};  // std::thread cannot be joined for a while
  const auto run = [](void* function) -> void* {
    (*static_cast<std::function<void()>*>(function))();
    return nullptr;
  };
  TORCH_CHECK(pthread_create(&thread, nullptr, run, &body) == 0, "no thread could be made");
  std::exception_ptr error;
  {
    const py::gil_scoped_release release;
    try {
      called.get_future().get();
    } catch (...) {
      error = std::current_exception();
    }
  }
  may_end.set_value();
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 10;
  const bool ended = pthread_timedjoin_np(thread, nullptr, &until) == 0;
  if (!ended) {
    const py::gil_scoped_release release;
    pthread_join(thread, nullptr);
  }
  if (error) std::rethrow_exception(error);
  return ended;
}

// Calls an op from a thread that Python never saw, `times` times; returns the seconds of one call.
double call_on_a_thread(const std::string& name, const std::string& overload,
                        const std::vector<at::Tensor>& tensors, const py::tuple& rest, int times) {
  const auto [op, arguments] = call_of(name, overload, tensors, rest);
  std::chrono::duration<double> spent{};
  std::exception_ptr error;
  {
    const py::gil_scoped_release release;
    std::thread thread([&] {
      try {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < times; ++i) {
          auto stack = arguments;
          op.callBoxed(&stack);
        }
        spent = std::chrono::steady_clock::now() - start;
      } catch (...) {
        error = std::current_exception();
      }
    });
    thread.join();
  }
  if (error) std::rethrow_exception(error);
  return spent.count() / times;
}

// y[i] = factor * x[i] for i < n; the parameters are x, y (float32), n (int64) and factor
// (float64).
void scale_kernel(void** parameters, int32_t) {
  const auto* x = *static_cast<const float**>(parameters[0]);
  auto* y = *static_cast<float**>(parameters[1]);
  const int64_t n = *static_cast<const int64_t*>(parameters[2]);
  const double factor = *static_cast<const double*>(parameters[3]);
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(factor * x[i]);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, probes) {
  probes.def("call_on_a_thread", &call_on_a_thread, py::arg("name"), py::arg("overload"),
             py::arg("tensors"), py::arg("rest"), py::arg("times") = 1,
             "Calls an op from a thread that Python never saw; the seconds of one call.");
  probes.def("needs_no_gil", &needs_no_gil, py::arg("name"), py::arg("overload"),
             py::arg("tensors"), py::arg("rest"),
             "Whether a call on another thread ends while this one holds the GIL.");
  probes.def("ends_without_gil", &ends_without_gil, py::arg("name"), py::arg("overload"),
             py::arg("tensors"), py::arg("rest"),
             "Whether a thread that called ends while this one holds the GIL.");
  probes.attr("plus_one") = py::capsule(reinterpret_cast<void*>(&plus_one));
  probes.attr("scale_kernel") = reinterpret_cast<uint64_t>(&scale_kernel);
}
