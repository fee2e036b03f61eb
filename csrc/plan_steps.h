// The steps of a plan that run something: CUDA kernels, tvm-ffi functions (by which CuteDSL
// launches), C functions, and other ops.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "plan.h"

namespace opgraft {

// --------------------------------------------------------------------------- kernel parameters

// A CUtensorMap, which a kernel that loads tiles by TMA gets for a tensor. It contains the address.
struct alignas(128) TensorMap {
  std::array<uint64_t, 16> words{};
};

// A kernel's parameters in the driver's form: a pointer to each, which has up to 8 bytes or is a
// map.
class Parameters {
 public:
  void add_value(uint64_t bits) { slots_.push_back(bits); }
  void add_pointer(const Pointer& pointer);
  void add_tensor_map(const TensorMap& map, const Pointer& pointer);

  size_t size() const noexcept { return slots_.size(); }
  void describe(Fingerprint& fingerprint) const;
  void visit(const Step::Visitor& visitor) const;
  size_t bytes() const noexcept;
  py::list saved() const;

  // The parameters of one launch, on the stack.
  class Filled {
   public:
    Filled(const Parameters& parameters, Replay& replay);
    Filled(const Filled&) = delete;
    Filled& operator=(const Filled&) = delete;
    void** get() noexcept { return addresses_.data(); }

   private:
    c10::SmallVector<uint64_t, 24> slots_;
    c10::SmallVector<void*, 24> addresses_;
    std::vector<TensorMap> maps_;
  };

 private:
  struct Patch {
    size_t slot;
    Pointer pointer;
  };
  struct Map {
    size_t slot;
    Pointer pointer;
    TensorMap map;
  };

  std::vector<uint64_t> slots_;
  std::vector<Patch> pointers_;
  std::vector<Map> maps_;
};

// --------------------------------------------------------------------------- kernels

// The part of the CUDA driver's C interface (cuda.h) that is used here. The core is built without
// CUDA's headers, and loads the driver when a kernel is first recorded.
// tests/plan/test_cuda_interface.py compares this with cuda.h.
namespace cuda {

struct LaunchAttribute {
  enum Id : uint32_t {
    kCooperative = 2,
    kClusterDimension = 4,
    kClusterSchedulingPolicyPreference = 5,
    kProgrammaticStreamSerialization = 6,
  };
  static constexpr uint32_t kSpread = 1;  // a cluster scheduling policy

  alignas(8) uint32_t id = 0;
  uint32_t padding = 0;
  std::array<uint32_t, 16> value{};
};
static_assert(sizeof(LaunchAttribute) == 72);

// Of CUfunction_attribute.
struct FunctionAttribute {
  enum Id : int { kMaxDynamicSharedSize = 8, kNonPortableClusterSizeAllowed = 14 };
};

constexpr int kRelaxedCapture = 2;  // of CUstreamCaptureMode

struct LaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared;
  void* stream;
  const LaunchAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

}  // namespace cuda

struct CudaLaunchShape {
  std::array<uint32_t, 3> grid{1, 1, 1};  // in Triton programs
  uint32_t threads = 32;
  uint32_t shared = 0;   // bytes of dynamic shared memory
  uint32_t cluster = 1;  // thread blocks per Triton program, along x
  bool cooperative = false;
  bool dependent = false;  // programmatic dependent launch
};

// The launch of a kernel from a module that the CUDA driver has loaded.
class CudaLaunch final : public Step {
 public:
  CudaLaunch(uint64_t function, CudaLaunchShape shape, Parameters parameters, std::string name);

  void run(Replay& replay) const override;
  void describe(Fingerprint& fingerprint) const override;
  std::string text() const override;
  void visit(const Visitor& visitor) const override { parameters_.visit(visitor); }
  bool is_launch() const noexcept override { return true; }
  size_t bytes() const noexcept override { return sizeof(*this) + parameters_.bytes(); }
  py::object saved() const override;

 private:
  void* function_;
  CudaLaunchShape shape_;
  std::vector<cuda::LaunchAttribute> attributes_;
  Parameters parameters_;
  std::string name_;
};

// The sizes in bytes of a kernel's parameters, according to its module; empty if the driver is too
// old to tell.
std::vector<size_t> cuda_parameter_sizes(uint64_t function);

// A kernel of a compiled module. Once loaded, a module stays: plans of any thread may launch it.
struct CudaKernel {
  std::string image;  // the module: a cubin
  std::string name;
  uint32_t shared = 0;   // bytes of dynamic shared memory
  uint32_t cluster = 1;  // thread blocks per Triton program
};

// Loads a kernel onto a device, and returns its address. No other thread's capture of a CUDA graph
// fails for it. Throws LaunchError.
uint64_t load_cuda_kernel(const CudaKernel& kernel, c10::DeviceIndex device);

// A C function, `void f(void** parameters, int32_t count)`: a kernel on the CPU.
class FunctionCall final : public Step {
 public:
  using Function = void (*)(void** parameters, int32_t count);
  FunctionCall(Function function, Parameters parameters, std::string name)
      : function_(function), parameters_(std::move(parameters)), name_(std::move(name)) {}

  void run(Replay& replay) const override;
  void describe(Fingerprint& fingerprint) const override;
  std::string text() const override { return "call " + name_; }
  void visit(const Visitor& visitor) const override { parameters_.visit(visitor); }
  bool is_launch() const noexcept override { return true; }
  size_t bytes() const noexcept override { return sizeof(*this) + parameters_.bytes(); }
  py::object saved() const override;

 private:
  Function function_;
  Parameters parameters_;
  std::string name_;
};

// --------------------------------------------------------------------------- tvm-ffi

// The part of tvm-ffi's C interface (c_api.h, and DLPack's tensor) that is used here.
namespace ffi {

enum TypeIndex : int32_t {
  kNone = 0,
  kInt = 1,
  kBool = 2,
  kFloat = 3,
  kOpaquePtr = 4,
  kDataType = 5,
  kDevice = 6,
  kDLTensorPtr = 7,
  kSmallStr = 11,
  kObjectBegin = 64,
  kShape = 69,
  kTensor = 70,
};

struct Any {
  int32_t type_index = kNone;
  uint32_t padding = 0;
  union {
    int64_t integer = 0;
    void* pointer;
  };
};

struct Tensor {  // DLTensor
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The header of every object. In a tensor object a DLTensor follows it.
struct Object {
  uint64_t references;
  int32_t type_index;
  uint32_t padding;
  void* deleter;
};

using Function = int (*)(void* self, const Any* arguments, int32_t count, Any* result);

// A tensor on a device, without its memory, sizes and strides.
Tensor tensor_on(c10::Device device, std::tuple<uint8_t, uint8_t, uint16_t> dtype, size_t ndim);

}  // namespace ffi

class FfiCall final : public Step {
 public:
  struct Argument {
    ffi::Any value{};  // unused for tensors and the stream
    bool is_stream = false;
    bool is_tensor = false;
    Pointer pointer{};  // for a tensor
    ffi::Tensor tensor{};
    std::vector<int64_t> shape{};
    std::vector<int64_t> strides{};
  };

  // What is called: an object of tvm-ffi's, or a function of a library as tvm-ffi declares it.
  enum class Callee : uint8_t { Object, Function };

  // `handle`: the object's, or the function's address. The plan keeps it alive.
  FfiCall(uint64_t handle, std::vector<Argument> arguments, Callee callee = Callee::Object);

  void run(Replay& replay) const override;
  void describe(Fingerprint& fingerprint) const override;
  std::string text() const override { return "call a tvm-ffi function"; }
  void visit(const Visitor& visitor) const override;
  bool is_launch() const noexcept override { return true; }
  size_t bytes() const noexcept override;
  py::object saved() const override;

 private:
  void* handle_;
  Callee callee_;
  std::vector<Argument> arguments_;
  size_t tensors_ = 0;
};

// Calls a tvm-ffi function by its handle.
int call_ffi(void* handle, const ffi::Any* arguments, int32_t count, ffi::Any* result);

// --------------------------------------------------------------------------- other ops

// A call of another op, through the dispatcher.
class BoxedCall final : public Step {
 public:
  // A tensor that the op returned in new memory. Later steps are valid only for a tensor with the
  // same metadata: a replay that gets another one stops.
  struct Result {
    int32_t memory;  // -1: it is on an earlier result's memory
    int32_t output;
    int32_t item;  // of a list, or -1
    c10::ScalarType dtype;
    c10::Device device;
    int64_t offset;  // in its storage
    std::vector<int64_t> sizes{};
    std::vector<int64_t> strides{};

    bool fits(const at::Tensor& tensor) const;
  };

  BoxedCall(c10::OperatorHandle op, std::vector<Operand> inputs, std::vector<Result> results)
      : op_(std::move(op)), inputs_(std::move(inputs)), results_(std::move(results)) {}

  void run(Replay& replay) const override;
  void describe(Fingerprint& fingerprint) const override;
  std::string text() const override;
  void visit(const Visitor& visitor) const override;
  size_t bytes() const noexcept override;
  py::object saved() const override;

 private:
  c10::OperatorHandle op_;
  std::vector<Operand> inputs_;
  std::vector<Result> results_;
};

}  // namespace opgraft
