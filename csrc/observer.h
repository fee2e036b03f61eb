// Observation of routing from Python: what a trace records.
#pragma once

#include <memory>

#include "python_impl.h"
#include "router.h"

namespace opgraft {

class PythonObserver final : public Observer {
 public:
  explicit PythonObserver(std::shared_ptr<const Signature> signature)
      : signature_(std::move(signature)) {}

  // `begin(values, kept)` is called before a call is routed and returns a function `end`, or None;
  // `end(ran, fell_back, raised, seconds)` after it. `ran`: (pack, name) of the override; None:
  // native. Needs the GIL, as does whoever calls it.
  void set(PythonRef begin) { begin_ = std::move(begin); }

  // `decompose(values)` returns the results of a composite op's decomposition in Python, or
  // NotImplemented.
  void set_decompose(PythonRef decompose) { decompose_ = std::move(decompose); }

  bool decompose(Call& call) override;
  void observe(Call& call, bool kept, const std::function<void()>& route) override;

 private:
  PythonRef begin(const Call& call, bool kept) const;
  static void end(const PythonRef& function, const Call& call, bool raised, double seconds);

  PythonRef begin_;
  PythonRef decompose_;
  std::shared_ptr<const Signature> signature_;
};

}  // namespace opgraft
