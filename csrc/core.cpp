// The compiled core of opgraft. It holds what a loader must know to trust it, and nothing more yet: the
// torch that it was compiled against and the facts of the C++ ABI. Calls are routed in Python.
//
// TORCH_EXTENSION_NAME, which the build defines, names the torch that this is for: _C_torch2_13.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <string>

namespace py = pybind11;

namespace {

// "2.13.0": the release of the headers, without the local part ("+cpu") that torch.__version__ carries.
std::string torch_version() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
         std::to_string(TORCH_VERSION_PATCH);
}

constexpr bool uses_cxx11_abi() {
#if defined(_GLIBCXX_USE_CXX11_ABI)
  return _GLIBCXX_USE_CXX11_ABI != 0;
#else
  return true;  // another standard library: there is only one
#endif
}

constexpr const char* compiler() {
#if defined(__VERSION__)
  return __VERSION__;
#else
  return "unknown";
#endif
}

py::dict abi_facts() {
  py::dict facts;
  facts["cxx11_abi"] = uses_cxx11_abi();
  facts["cplusplus"] = static_cast<long>(__cplusplus);
  facts["compiler"] = compiler();
  return facts;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, core) {
  core.doc() =
      "opgraft's compiled core. Today it only states what it was compiled against; it routes no calls yet.";
  core.def("torch_version", &torch_version, "The release of the torch headers it was compiled against.");
  core.def("abi", &abi_facts,
             "What it was compiled as: `cxx11_abi` must be the running torch's; `cplusplus` and `compiler` inform.");
}
