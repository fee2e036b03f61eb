// Shadow mode: a share of hits is run by the native kernel as well, and compared, in Python.
#pragma once

#include <memory>

#include "python_impl.h"
#include "router.h"

namespace opgraft {

// Stands in for an override's own impl while shadow mode is on, and only then is it published: off,
// it costs a hit nothing, not a load.
class ShadowImpl final : public Impl {
 public:
  struct Options {
    std::shared_ptr<const Override> inner;  // what runs
    std::shared_ptr<const Signature> signature;
    PythonRef override;
    PythonRef
        begin;      // begin(override, values) -> token, or None where the hit is not to be compared
    PythonRef end;  // end(override, keyset, token, results) -> None, or other results
    double rate;    // of hits that are compared, in (0, 1]
  };
  explicit ShadowImpl(Options options) : options_(std::move(options)) {}

  bool run(const Override& override, Call& call, c10::Device device) override;
  bool wants(const Override& override, Call& call) override;
  bool quarantine(const Call& call) override { return options_.inner->impl->quarantine(call); }

 private:
  PythonRef begin(const Call& call) const;
  void end(Call& call, const PythonRef& token) const;

  Options options_;
};

// The same override as `inner`, with the same counters, that shadows its hits.
std::shared_ptr<Override> shadowed(ShadowImpl::Options options);

}  // namespace opgraft
