// What torch keeps private and a router cannot do without, in one place.
//
// C++ lets an explicit instantiation name private members, and a friend that it defines hand them
// out. Should a later torch rename one, this does not compile.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/boxing/KernelFunction.h>
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

// Takes an object out of torch's thread-local state.
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

// While it lives, what is called on this thread runs as a kernel below these keys would.
//
// Where autocast stays on, its cache does not: what it keeps of a parameter here was cast below
// autograd, and whoever took it from there later would lose that parameter's gradient.
class AsAKernel {
 public:
  explicit AsAKernel(c10::DispatchKeySet excluded) : below_(excluded) {
    const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
    if (C10_LIKELY(off.has_all(c10::autocast_dispatch_keyset))) return;
    caches_ = at::autocast::is_autocast_cache_enabled();
    if (caches_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~AsAKernel() {
    if (C10_UNLIKELY(caches_)) at::autocast::set_autocast_cache_enabled(true);
  }
  AsAKernel(const AsAKernel&) = delete;
  AsAKernel& operator=(const AsAKernel&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard below_;
  bool caches_ = false;
};

// A copy of the kernel inside a SafeKernelFunction, which itself refuses to be called once whoever
// registered the kernel deregisters it.
inline c10::KernelFunction kernel_of(const c10::SafeKernelFunction& safe) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  return safe.*member(torch_private::Safe{});
#else
  return safe.kernelFunction();
#endif
}

// Gives a boxed kernel a function that is called in its place with C++ arguments, after the functor
// and the dispatch keys. torch's own way to make such a kernel compiles for a tenth of a second
// each.
inline void set_unboxed(c10::KernelFunction& kernel, void* function, bool takes_symbolic_sizes) {
  kernel.*(takes_symbolic_sizes ? member(torch_private::SymUnboxed{})
                                : member(torch_private::Unboxed{})) = function;
}

}  // namespace opgraft
