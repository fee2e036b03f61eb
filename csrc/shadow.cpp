#include "shadow.h"

#include <random>

namespace opgraft {

namespace {

bool is_sampled(double rate) {
  thread_local std::minstd_rand generator{std::random_device{}()};
  return std::generate_canonical<double, 24>(generator) < rate;
}

}  // namespace

bool ShadowImpl::run(const Override&, Call& call, c10::Device device) {
  const Override& inner = *options_.inner;
  if (!is_sampled(options_.rate)) return inner.impl->run(inner, call, device);
  // Before the impl runs, because it may write to its arguments, and its results replace them on
  // the stack.
  const PythonRef token = begin(call);
  if (!inner.impl->run(inner, call, device)) return false;
  if (token.get()) end(call, token);
  return true;
}

bool ShadowImpl::takes(const Override&, Call& call) {
  return options_.inner->impl->takes(*options_.inner, call);
}

PythonRef ShadowImpl::begin(const Call& call) const {
  const PythonAccess python;
  if (!python) return {};
  const auto values = options_.converter->to_python(call.begin());
  auto token = call_python(options_.begin.get(), options_.override.get(), values);
  if (token.is_none()) return {};
  return PythonRef(std::move(token));
}

void ShadowImpl::end(Call& call, const PythonRef& token) const {
  const PythonAccess python;
  if (!python) return;
  const auto outputs = static_cast<ptrdiff_t>(call.op.schema().returns().size());
  torch::jit::Stack results(call.stack.end() - outputs, call.stack.end());
  const auto mine = options_.converter->pop_results(results);
  const auto keyset = py::cast(call.keyset);
  const auto other =
      call_python(options_.end.get(), options_.override.get(), keyset, token.get(), mine);
  if (other.is_none()) return;
  auto replacement = options_.converter->to_results(other, "the native kernel");
  torch::jit::drop(call.stack, static_cast<size_t>(outputs));
  for (auto& value : replacement) call.stack.push_back(std::move(value));
}

std::shared_ptr<Override> shadowed(ShadowImpl::Options options) {
  const auto& inner = *options.inner;
  auto outer = std::make_shared<Override>();
  outer->decides_in_python.store(inner.decides_in_python.load());
  outer->condition = inner.condition;
  outer->misses = inner.misses;
  outer->hits = inner.hits;
  outer->fallbacks = inner.fallbacks;
  outer->identity = inner.identity;
  outer->label = inner.label;
  outer->is_differentiated = inner.is_differentiated;
  outer->has_functions = inner.has_functions;
  outer->impl = std::make_unique<ShadowImpl>(std::move(options));
  return outer;
}

}  // namespace opgraft
