// Shadow mode: for a fraction of hits Python runs the native kernel as well, and compares.
#pragma once

#include <memory>

#include "python_impl.h"
#include "router.h"

namespace opgraft {

// Wraps an override's impl while shadow mode is on. It is published only then, so shadow mode costs
// hits nothing while it is off.
class ShadowImpl final : public Impl {
 public:
  struct Options {
    std::shared_ptr<const Override> inner;  // the override to run
    std::shared_ptr<const PythonConverter> converter;
    PythonRef override;
    PythonRef
        begin;      // begin(override, values) -> token, or None where the hit is not to be compared
    PythonRef end;  // end(override, keyset, token, results) -> None, or other results
    double rate;    // fraction of hits that are compared, in (0, 1]
  };
  explicit ShadowImpl(Options options) : options_(std::move(options)) {}

  bool run(const Override& override, Call& call, c10::Device device) override;
  bool takes(const Override& override, Call& call) override;
  bool quarantine(const Call& call) override { return options_.inner->impl->quarantine(call); }

 private:
  PythonRef begin(const Call& call) const;
  void end(Call& call, const PythonRef& token) const;

  Options options_;
};

// A copy of `inner`, with the same counters, that compares its hits.
std::shared_ptr<Override> shadowed(ShadowImpl::Options options);

}  // namespace opgraft
