// Observers of routing in Python, which traces use.
#pragma once

#include <memory>

#include "python_impl.h"
#include "router.h"

namespace opgraft {

class PythonObserver final : public Observer {
 public:
  explicit PythonObserver(std::shared_ptr<const PythonConverter> converter)
      : converter_(std::move(converter)) {}

  // `begin(values, keeps_derivative)` is called before a call is routed. It returns None or a
  // function `end(ran, fell_back, raised, seconds)`, which is called after it. `ran` is the
  // override's (pack, name), or None for native. The caller needs the GIL.
  void set(PythonRef begin) { begin_ = std::move(begin); }

  // `decompose(values)` runs a composite op's decomposition in Python. It returns the results, or
  // NotImplemented.
  void set_decompose(PythonRef decompose) { decompose_ = std::move(decompose); }

  bool decompose(Call& call) override;
  void observe(Call& call, bool keeps_derivative, const std::function<void()>& route) override;

 private:
  PythonRef begin(const Call& call, bool keeps_derivative) const;
  static void end(const PythonRef& function, const Call& call, bool raised, double seconds);

  PythonRef begin_;
  PythonRef decompose_;
  std::shared_ptr<const PythonConverter> converter_;
};

}  // namespace opgraft
