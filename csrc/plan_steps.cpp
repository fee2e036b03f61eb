#include "plan_steps.h"

#include <ATen/core/stack.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace opgraft {

namespace {

[[noreturn]] void cannot_launch(const std::string& message) {
  throw LaunchError({__func__, __FILE__, __LINE__}, message);
}

void* symbol(void* library, const char* name) {
  return library == nullptr ? nullptr : dlsym(library, name);
}

}  // namespace

// --------------------------------------------------------------------------- the CUDA driver

namespace cuda {

namespace {

using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kInvalidContext = 201;

struct Driver {
  Result (*launch)(const LaunchConfig*, void* function, void** parameters, void** extra);
  Result (*error_string)(Result, const char**);
  Result (*get_device)(int*, int ordinal);
  Result (*retain_context)(void**, int device);
  Result (*set_context)(void*);
  Result (*replace_address)(TensorMap*, void*);
  Result (*parameter_info)(void* function, size_t index, size_t* offset, size_t* size);
  Result (*load_module)(void** module, const void* image);
  Result (*get_function)(void** function, void* module, const char* name);
  Result (*set_attribute)(void* function, int attribute, int value);
  Result (*exchange_capture_mode)(int* mode);

  static const Driver& instance() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    const auto load = [library](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol(library, name));
    };
    load(launch, "cuLaunchKernelEx");
    load(error_string, "cuGetErrorString");
    load(get_device, "cuDeviceGet");
    load(retain_context, "cuDevicePrimaryCtxRetain");
    load(set_context, "cuCtxSetCurrent");
    load(replace_address, "cuTensorMapReplaceAddress");
    load(parameter_info, "cuFuncGetParamInfo");
    load(load_module, "cuModuleLoadData");
    load(get_function, "cuModuleGetFunction");
    load(set_attribute, "cuFuncSetAttribute");
    load(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  }
};

// No context is current on a thread that has not called the CUDA runtime yet. torch uses the
// device's primary context, and the runtime would make it current, too.
bool adopt_primary_context(const Driver& driver, c10::DeviceIndex index) {
  int device = 0;
  void* context = nullptr;
  return driver.get_device != nullptr && driver.retain_context != nullptr &&
         driver.set_context != nullptr && driver.get_device(&device, index) == kSuccess &&
         driver.retain_context(&context, device) == kSuccess &&
         driver.set_context(context) == kSuccess;
}

std::string message(const Driver& driver, Result error) {
  const char* text = nullptr;
  if (driver.error_string != nullptr) driver.error_string(error, &text);
  return std::string(text == nullptr ? "unknown error" : text) + " (" + std::to_string(error) + ")";
}

}  // namespace

}  // namespace cuda

std::vector<size_t> cuda_parameter_sizes(uint64_t function) {
  const auto& driver = cuda::Driver::instance();
  std::vector<size_t> sizes;
  if (driver.parameter_info == nullptr) return sizes;
  size_t offset = 0;
  size_t size = 0;
  while (driver.parameter_info(reinterpret_cast<void*>(function), sizes.size(), &offset, &size) ==
         cuda::kSuccess) {
    sizes.push_back(size);
  }
  return sizes;
}

namespace cuda {

namespace {

// What every kernel may have, and every cluster.
constexpr uint32_t kSharedOfAll = 48 << 10;
constexpr uint32_t kClusterOfAll = 8;

// While it lives, this thread may do what would end a capture of a CUDA graph by another one.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() {
    if (driver_.exchange_capture_mode != nullptr) driver_.exchange_capture_mode(&mode_);
  }

  const Driver& driver_;
  int mode_ = kRelaxedCapture;
};

void check(const Driver& driver, Result result, const std::string& what) {
  if (result != kSuccess) cannot_launch("CUDA error: " + message(driver, result) + " when " + what);
}

}  // namespace

}  // namespace cuda

uint64_t load_cuda_kernel(const CudaKernel& kernel, c10::DeviceIndex device) {
  const auto& driver = cuda::Driver::instance();
  if (driver.load_module == nullptr || driver.get_function == nullptr ||
      driver.set_attribute == nullptr) {
    cannot_launch("there is no CUDA driver (libcuda.so.1)");
  }
  if (!cuda::adopt_primary_context(driver, device)) cannot_launch("the device has no context");
  const cuda::RelaxedCapture relaxed(driver);
  void* module = nullptr;
  void* function = nullptr;
  cuda::check(driver, driver.load_module(&module, kernel.image.data()), "loading " + kernel.name);
  cuda::check(driver, driver.get_function(&function, module, kernel.name.c_str()),
              "looking for " + kernel.name);
  if (kernel.shared > cuda::kSharedOfAll) {
    cuda::check(driver,
                driver.set_attribute(function, cuda::FunctionAttribute::kMaxDynamicSharedSize,
                                     static_cast<int>(kernel.shared)),
                "giving shared memory to " + kernel.name);
  }
  if (kernel.cluster > cuda::kClusterOfAll) {
    constexpr auto allowed = cuda::FunctionAttribute::kNonPortableClusterSizeAllowed;
    cuda::check(driver, driver.set_attribute(function, allowed, 1),
                "allowing clusters of " + kernel.name);
  }
  return reinterpret_cast<uint64_t>(function);
}

// --------------------------------------------------------------------------- Parameters

void Parameters::add_pointer(const Pointer& pointer) {
  if (pointer.base != Pointer::Base::Null) pointers_.push_back({slots_.size(), pointer});
  slots_.push_back(0);
}

void Parameters::add_tensor_map(const TensorMap& map, const Pointer& pointer) {
  maps_.push_back({slots_.size(), pointer, map});
  slots_.push_back(0);
}

void Parameters::describe(Fingerprint& fingerprint) const {
  fingerprint.add(slots_.size());
  for (const uint64_t slot : slots_) fingerprint.add(slot);
  for (const Patch& patch : pointers_) {
    fingerprint.add(patch.slot);
    fingerprint.add(patch.pointer);
  }
  // Without the map's words, which hold the recorded address.
  for (const Map& each : maps_) {
    fingerprint.add(each.slot);
    fingerprint.add(each.pointer);
  }
}

void Parameters::visit(const Step::Visitor& visitor) const {
  const auto each = [&visitor](const Pointer& pointer) {
    if (pointer.base == Pointer::Base::Memory) visitor(pointer.memory, false);
  };
  for (const Patch& patch : pointers_) each(patch.pointer);
  for (const Map& map : maps_) each(map.pointer);
}

size_t Parameters::bytes() const noexcept {
  return slots_.size() * sizeof(uint64_t) + pointers_.size() * sizeof(Patch) +
         maps_.size() * sizeof(Map);
}

Parameters::Filled::Filled(const Parameters& parameters, Replay& replay)
    : slots_(parameters.slots_.begin(), parameters.slots_.end()),
      addresses_(parameters.slots_.size()) {
  for (const Patch& patch : parameters.pointers_) {
    slots_[patch.slot] = reinterpret_cast<uint64_t>(replay.address(patch.pointer));
  }
  for (size_t i = 0; i < slots_.size(); ++i) addresses_[i] = &slots_[i];
  if (C10_LIKELY(parameters.maps_.empty())) return;
  const auto& driver = cuda::Driver::instance();
  maps_.reserve(parameters.maps_.size());
  for (const Map& each : parameters.maps_) {
    maps_.push_back(each.map);
    if (driver.replace_address == nullptr ||
        driver.replace_address(&maps_.back(), replay.address(each.pointer)) != cuda::kSuccess) {
      cannot_launch("a tensor map's address cannot be replaced");
    }
    addresses_[each.slot] = &maps_.back();
  }
}

// --------------------------------------------------------------------------- CudaLaunch

CudaLaunch::CudaLaunch(uint64_t function, CudaLaunchShape shape, Parameters parameters,
                       std::string name)
    : function_(reinterpret_cast<void*>(function)),
      shape_(shape),
      parameters_(std::move(parameters)),
      name_(std::move(name)) {
  const auto add = [this](uint32_t id, std::array<uint32_t, 3> value) {
    auto& attribute = attributes_.emplace_back();
    attribute.id = id;
    std::copy(value.begin(), value.end(), attribute.value.begin());
  };
  using Attribute = cuda::LaunchAttribute;
  if (shape.dependent) add(Attribute::kProgrammaticStreamSerialization, {1, 0, 0});
  if (shape.cooperative) add(Attribute::kCooperative, {1, 0, 0});
  if (shape.cluster != 1) {
    add(Attribute::kClusterDimension, {shape.cluster, 1, 1});
    add(Attribute::kClusterSchedulingPolicyPreference, {Attribute::kSpread, 0, 0});
  }
}

void CudaLaunch::run(Replay& replay) const {
  const auto& driver = cuda::Driver::instance();
  if (C10_UNLIKELY(driver.launch == nullptr)) {
    cannot_launch("the CUDA driver has no cuLaunchKernelEx, or there is none (libcuda.so.1)");
  }
  Parameters::Filled parameters(parameters_, replay);
  const cuda::LaunchConfig config{
      {shape_.grid[0] * shape_.cluster, shape_.grid[1], shape_.grid[2]},
      {shape_.threads, 1, 1},
      shape_.shared,
      replay.stream(),
      attributes_.data(),
      static_cast<uint32_t>(attributes_.size()),
  };
  auto error = driver.launch(&config, function_, parameters.get(), nullptr);
  if (C10_UNLIKELY(error == cuda::kInvalidContext) &&
      cuda::adopt_primary_context(driver, replay.device().index())) {
    error = driver.launch(&config, function_, parameters.get(), nullptr);
  }
  if (C10_UNLIKELY(error != cuda::kSuccess)) {
    cannot_launch("CUDA error: " + cuda::message(driver, error) + " when launching " + name_);
  }
}

void CudaLaunch::describe(Fingerprint& fingerprint) const {
  fingerprint.add(std::string("cuda"));
  fingerprint.add(reinterpret_cast<uint64_t>(function_));
  for (const uint32_t size : shape_.grid) fingerprint.add(size);
  for (const uint32_t number : {shape_.threads, shape_.shared, shape_.cluster})
    fingerprint.add(number);
  fingerprint.add(static_cast<uint64_t>(shape_.cooperative) * 2 + shape_.dependent);
  parameters_.describe(fingerprint);
}

std::string CudaLaunch::text() const {
  return "launch " + name_ + " [" + std::to_string(shape_.grid[0]) + ", " +
         std::to_string(shape_.grid[1]) + ", " + std::to_string(shape_.grid[2]) + "] x " +
         std::to_string(shape_.threads);
}

// --------------------------------------------------------------------------- FunctionCall

void FunctionCall::run(Replay& replay) const {
  Parameters::Filled parameters(parameters_, replay);
  function_(parameters.get(), static_cast<int32_t>(parameters_.size()));
}

void FunctionCall::describe(Fingerprint& fingerprint) const {
  fingerprint.add(std::string("function"));
  fingerprint.add(reinterpret_cast<uint64_t>(function_));
  parameters_.describe(fingerprint);
}

// --------------------------------------------------------------------------- FfiCall

namespace ffi {

namespace {

struct ByteArray {
  const char* data;
  size_t size;
};

// Follows an error object's header.
struct ErrorCell {
  ByteArray kind;
  ByteArray message;
};

struct Library {
  int (*call)(void* function, Any* arguments, int32_t count, Any* result);
  int (*set_stream)(int32_t device_type, int32_t device_id, void* stream, void** before);
  void (*take_error)(void** error);
  int (*release)(void* object);

  static const Library& instance() {
    static const Library library;
    return library;
  }

  bool is_usable() const noexcept { return call != nullptr && set_stream != nullptr; }

 private:
  Library() {
    // Already loaded, because a function of it exists.
    void* library = dlopen("libtvm_ffi.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto load = [library](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol(library, name));
    };
    load(call, "TVMFFIFunctionCall");
    load(set_stream, "TVMFFIEnvSetStream");
    load(take_error, "TVMFFIErrorMoveFromRaised");
    load(release, "TVMFFIObjectDecRef");
  }
};

std::string raised(const Library& library) {
  void* error = nullptr;
  if (library.take_error != nullptr) library.take_error(&error);
  if (error == nullptr) return "an unknown error";
  const auto* cell =
      reinterpret_cast<const ErrorCell*>(static_cast<const char*>(error) + sizeof(Object));
  std::string message(cell->message.data, cell->message.size);
  if (library.release != nullptr) library.release(error);
  return message;
}

}  // namespace

}  // namespace ffi

ffi::Tensor ffi::tensor_on(c10::Device device, std::tuple<uint8_t, uint8_t, uint16_t> dtype,
                           size_t ndim) {
  // DLPack's numbers of device types.
  constexpr int32_t kCpu = 1;
  constexpr int32_t kCuda = 2;
  Tensor tensor{};
  tensor.device.type = device.is_cuda() ? kCuda : kCpu;
  tensor.device.id = device.is_cuda() ? device.index() : 0;
  tensor.ndim = static_cast<int32_t>(ndim);
  std::tie(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) = dtype;
  return tensor;
}

int call_ffi(void* handle, const ffi::Any* arguments, int32_t count, ffi::Any* result) {
  const auto& library = ffi::Library::instance();
  TORCH_CHECK(library.is_usable(), "libtvm_ffi.so is not loaded, or too old");
  return library.call(handle, const_cast<ffi::Any*>(arguments), count, result);
}

FfiCall::FfiCall(uint64_t handle, std::vector<Argument> arguments, Callee callee)
    : handle_(reinterpret_cast<void*>(handle)), callee_(callee), arguments_(std::move(arguments)) {
  for (const Argument& argument : arguments_) tensors_ += argument.is_tensor ? 1 : 0;
}

void FfiCall::run(Replay& replay) const {
  const auto& library = ffi::Library::instance();
  if (C10_UNLIKELY(!library.is_usable())) cannot_launch("libtvm_ffi.so is not loaded, or too old");
  c10::SmallVector<ffi::Any, 16> values(arguments_.size());
  c10::SmallVector<ffi::Tensor, 12> tensors(tensors_);
  auto* tensor = tensors.data();
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    values[i] = argument.value;
    if (argument.is_tensor) {
      *tensor = argument.tensor;
      tensor->data = replay.address(argument.pointer);
      tensor->shape = const_cast<int64_t*>(argument.shape.data());
      tensor->strides = const_cast<int64_t*>(argument.strides.data());
      values[i].type_index = ffi::kDLTensorPtr;
      values[i].pointer = tensor++;
    } else if (argument.is_stream) {
      values[i].pointer = replay.stream();
    }
  }
  // tvm-ffi has its own current stream for each device.
  const c10::Device device = replay.device();
  constexpr int32_t kCuda = 2;
  void* before = nullptr;
  if (device.is_cuda()) library.set_stream(kCuda, device.index(), replay.stream(), &before);
  ffi::Any result;
  const auto count = static_cast<int32_t>(values.size());
  const int failed = callee_ == Callee::Object ? call_ffi(handle_, values.data(), count, &result)
                                               : reinterpret_cast<ffi::Function>(handle_)(
                                                     nullptr, values.data(), count, &result);
  if (device.is_cuda()) library.set_stream(kCuda, device.index(), before, nullptr);
  if (C10_UNLIKELY(failed != 0)) cannot_launch(ffi::raised(library));
  if (C10_UNLIKELY(result.type_index >= ffi::kObjectBegin) && library.release != nullptr) {
    library.release(result.pointer);
  }
}

void FfiCall::describe(Fingerprint& fingerprint) const {
  fingerprint.add(std::string("ffi"));
  fingerprint.add(reinterpret_cast<uint64_t>(handle_));
  for (const Argument& argument : arguments_) {
    fingerprint.add(static_cast<uint64_t>(argument.is_tensor) * 2 + argument.is_stream);
    if (argument.is_tensor) {
      fingerprint.add(argument.pointer);
      fingerprint.add(argument.shape);
      fingerprint.add(argument.strides);
      fingerprint.add(reinterpret_cast<const char*>(&argument.tensor.dtype),
                      sizeof(argument.tensor.dtype));
    } else if (!argument.is_stream) {
      fingerprint.add(static_cast<uint64_t>(argument.value.type_index));
      fingerprint.add(static_cast<uint64_t>(argument.value.integer));
    }
  }
}

void FfiCall::visit(const Visitor& visitor) const {
  for (const Argument& argument : arguments_) {
    if (argument.pointer.base == Pointer::Base::Memory) visitor(argument.pointer.memory, false);
  }
}

size_t FfiCall::bytes() const noexcept {
  return sizeof(*this) + arguments_.size() * sizeof(Argument);
}

// --------------------------------------------------------------------------- BoxedCall

void BoxedCall::run(Replay& replay) const {
  torch::jit::Stack stack;
  stack.reserve(inputs_.size());
  for (const Operand& input : inputs_) stack.push_back(replay.value(input));
  op_.callBoxed(&stack);
  for (const Result& each : results_) {
    const c10::IValue& output = stack[static_cast<size_t>(each.output)];
    at::Tensor tensor = each.item < 0
                            ? output.toTensor()
                            : output.toListRef()[static_cast<size_t>(each.item)].toTensor();
    if (C10_UNLIKELY(!each.fits(tensor))) {
      cannot_launch(text() + " returned another dtype, device or shape than when it was recorded");
    }
    if (each.memory < 0) continue;
    Memory& memory = replay.memory(each.memory);
    memory.address = static_cast<char*>(tensor.storage().mutable_data());
    memory.result = std::move(tensor);
  }
}

bool BoxedCall::Result::fits(const at::Tensor& tensor) const {
  return tensor.scalar_type() == dtype && tensor.device() == device && tensor.has_storage() &&
         tensor.storage_offset() == offset && tensor.sizes() == c10::IntArrayRef(sizes) &&
         tensor.strides() == c10::IntArrayRef(strides);
}

void BoxedCall::describe(Fingerprint& fingerprint) const {
  fingerprint.add(std::string("op"));
  fingerprint.add(c10::toString(op_.operator_name()));
  for (const Operand& input : inputs_) fingerprint.add(input);
  for (const Result& each : results_) {
    fingerprint.add(static_cast<uint64_t>(each.memory));
    fingerprint.add(static_cast<uint64_t>(each.output));
    fingerprint.add(static_cast<uint64_t>(each.item));
    fingerprint.add(static_cast<uint64_t>(each.dtype));
    fingerprint.add(static_cast<uint64_t>(each.offset));
    fingerprint.add(each.sizes);
    fingerprint.add(each.strides);
  }
}

std::string BoxedCall::text() const { return "call " + c10::toString(op_.operator_name()); }

void BoxedCall::visit(const Visitor& visitor) const {
  for (const Operand& input : inputs_) opgraft::visit(input, visitor);
  for (const Result& each : results_) {
    if (each.memory >= 0) visitor(each.memory, true);
  }
}

size_t BoxedCall::bytes() const noexcept {
  return sizeof(*this) + inputs_.size() * sizeof(Operand) + results_.size() * sizeof(Result);
}

}  // namespace opgraft
