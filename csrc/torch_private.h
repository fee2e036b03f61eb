// All uses of torch's private members, in one place.
//
// An explicit template instantiation may name private members, and a friend function that it
// defines returns them. If a later torch renames one, this does not compile.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

// Their header includes every op's.
namespace at::autocast {
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
}  // namespace at::autocast

namespace opgraft {

namespace torch_private {

template <class Name, auto Member>
struct Reveal {
  friend typename Name::type member(Name) { return Member; }
};

struct Unboxed {
  using type = void* c10::KernelFunction::*;
  friend type member(Unboxed);
};
template struct Reveal<Unboxed, &c10::KernelFunction::unboxed_kernel_func_>;

struct SymUnboxed {
  using type = void* c10::KernelFunction::*;
  friend type member(SymUnboxed);
};
template struct Reveal<SymUnboxed, &c10::KernelFunction::sym_unboxed_kernel_func_>;

struct MatchesPolicy {
  using type = bool (c10::TensorImpl::*)(c10::TensorImpl::SizesStridesPolicy) const;
  friend type member(MatchesPolicy);
};
template struct Reveal<MatchesPolicy, &c10::TensorImpl::matches_policy>;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
struct Safe {
  using type = c10::KernelFunction c10::SafeKernelFunction::*;
  friend type member(Safe);
};
template struct Reveal<Safe, &c10::SafeKernelFunction::kernel_>;
#endif

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
struct PythonObjects {
  using type = std::unordered_map<std::string, std::shared_ptr<c10::SafePyObject>>
      at::impl::ThreadLocalPythonObjects::*;
  friend type member(PythonObjects);
};
template struct Reveal<PythonObjects, &at::impl::ThreadLocalPythonObjects::obj_dict_>;
#endif

}  // namespace torch_private

// Removes an object from torch's thread-local state.
inline void erase_python_object(const std::string& key) {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (!Objects::contains(key)) return;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  Objects state = Objects::get_state();
  (state.*member(torch_private::PythonObjects{})).erase(key);
  Objects::set_state(std::move(state));
#else
  Objects::erase(key);
#endif
}

// Whether a virtual function says what a tensor's sizes are.
inline bool has_custom_sizes(const c10::TensorImpl& tensor) {
  return (tensor.*
          member(torch_private::MatchesPolicy{}))(c10::TensorImpl::SizesStridesPolicy::CustomSizes);
}

// While it lives, these dispatch keys are excluded on this thread.
//
// If autocast stays on, its cache is switched off. A parameter would be cast below autograd here,
// and whoever took that cast from the cache later would lose the parameter's gradient.
class ExcludeKeys {
 public:
  explicit ExcludeKeys(c10::DispatchKeySet excluded) : below_(excluded) {
    const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
    if (C10_LIKELY(off.has_all(c10::autocast_dispatch_keyset))) return;
    caches_ = at::autocast::is_autocast_cache_enabled();
    if (caches_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~ExcludeKeys() {
    if (C10_UNLIKELY(caches_)) at::autocast::set_autocast_cache_enabled(true);
  }
  ExcludeKeys(const ExcludeKeys&) = delete;
  ExcludeKeys& operator=(const ExcludeKeys&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard below_;
  bool caches_ = false;
};

// A copy of the kernel inside a SafeKernelFunction. The SafeKernelFunction itself cannot be called
// any more once its kernel is deregistered.
inline c10::KernelFunction kernel_of(const c10::SafeKernelFunction& safe) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  return safe.*member(torch_private::Safe{});
#else
  return safe.kernelFunction();
#endif
}

// Adds an unboxed function to a boxed kernel. It is called with the functor, the dispatch keys and
// the C++ arguments. torch's own way to make such a kernel takes a tenth of a second to compile for
// each.
inline void set_unboxed(c10::KernelFunction& kernel, void* function, bool takes_symbolic_sizes) {
  kernel.*(takes_symbolic_sizes ? member(torch_private::SymUnboxed{})
                                : member(torch_private::Unboxed{})) = function;
}

}  // namespace opgraft
