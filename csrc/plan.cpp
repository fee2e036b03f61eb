#include "plan.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <iterator>

// Its header includes every op's.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace opgraft {

// --------------------------------------------------------------------------- PlanKey

namespace {

enum class KeyTag : uint64_t {
  Tensor = 1,
  None,
  Integer,
  Real,
  Boolean,
  Complex,
  String,
  Device,
  List
};

uint64_t tagged(KeyTag tag, uint64_t rest) { return static_cast<uint64_t>(tag) | rest << 8; }

// Devices with an autocast dtype that an override may be for.
constexpr c10::DeviceType kAutocast[] = {
    c10::DeviceType::CPU, c10::DeviceType::CUDA, c10::DeviceType::XPU, c10::DeviceType::MPS,
    c10::DeviceType::HPU, c10::DeviceType::MTIA, c10::DeviceType::XLA, c10::DeviceType::PrivateUse1,
};

uint64_t bits(double value) {
  uint64_t result = 0;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

}  // namespace

inline uint64_t* PlanKey::reserve_words(size_t count) noexcept {
  if (C10_UNLIKELY(size_ + count > kWords)) return nullptr;
  uint64_t* words = words_.data() + size_;
  size_ += count;
  return words;
}

bool PlanKey::add(const c10::TensorImpl& tensor) noexcept {
  if (C10_UNLIKELY(tensors_ == locations_.size() || !tensor.has_storage())) return false;
  const auto sizes = tensor.sizes();
  const size_t rank = sizes.size();
  const c10::Device device = tensor.device();
  Location& location = locations_[tensors_];
  location = Location{&tensor};
  if (C10_LIKELY(tensor.numel() > 0)) {
    location.storage = tensor.unsafe_storage().unsafeGetStorageImpl();
    location.begin = reinterpret_cast<uintptr_t>(location.storage->data());
    location.end = location.begin + location.storage->nbytes();
    location.first =
        location.begin + static_cast<uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
  }
  const uintptr_t address = location.first;
  // An impl may check `q is k`, and then use one address for both.
  size_t same_tensor = tensors_;
  size_t same_storage = tensors_;  // the index of the first argument on its storage
  bool overlaps = false;
  for (size_t i = tensors_; i-- > 0;) {
    const Location& other = locations_[i];
    if (other.tensor == &tensor) same_tensor = i;
    if (other.storage == location.storage) {
      same_storage = i;
    } else {
      overlaps |= location.begin < other.end && other.begin < location.end;
    }
  }
  // A number: the host can read it without waiting, and an impl may pass it to a kernel as a value.
  const bool is_number = rank == 0 && device.is_cpu();
  auto* words =
      reserve_words(1 + 2 * rank + (is_number ? 2 : 0) + (same_storage < tensors_ ? 1 : 0));
  if (C10_UNLIKELY(words == nullptr || overlaps)) return false;
  *words++ =
      tagged(KeyTag::Tensor, static_cast<uint8_t>(c10::typeMetaToScalarType(tensor.dtype()))) |
      static_cast<uint64_t>(rank & 0xFF) << 16 |
      static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 24 |
      static_cast<uint64_t>(index_of(device)) << 32 |
      static_cast<uint64_t>(address % kKeyAlignment) << 40 |
      static_cast<uint64_t>(tensor.requires_grad()) << 44 |
      static_cast<uint64_t>(tensor.is_wrapped_number()) << 45 |
      static_cast<uint64_t>(same_tensor) << 48 | static_cast<uint64_t>(same_storage) << 56;
  if (C10_UNLIKELY(same_storage < tensors_)) *words++ = address - locations_[same_storage].first;
  ++tensors_;
  const auto strides = tensor.strides();
  for (size_t i = 0; i < rank; ++i) *words++ = static_cast<uint64_t>(sizes[i]);
  for (size_t i = 0; i < rank; ++i) *words++ = static_cast<uint64_t>(strides[i]);
  if (C10_UNLIKELY(is_number)) {
    words[0] = words[1] = 0;
    if (address != 0) {
      std::memcpy(words, reinterpret_cast<const void*>(address),
                  std::min(2 * sizeof(uint64_t), tensor.itemsize()));
    }
  }
  return true;
}

bool PlanKey::add(const Argument& argument) noexcept {
  using Kind = Argument::Kind;
  switch (argument.kind()) {
    case Kind::Tensor:
      return add(*argument.tensor());
    case Kind::List: {
      auto* head = reserve_words(1);
      if (head == nullptr) return false;
      *head = tagged(KeyTag::List, argument.size());
      for (size_t i = 0; i < argument.size(); ++i) {
        if (!add(argument.item(i))) return false;
      }
      return true;
    }
    case Kind::Text: {
      const std::string_view text = argument.text();
      const size_t count = (text.size() + sizeof(uint64_t) - 1) / sizeof(uint64_t);
      auto* words = reserve_words(1 + count);
      if (words == nullptr) return false;
      words[0] = tagged(KeyTag::String, text.size());
      std::fill_n(words + 1, count, 0);
      std::memcpy(words + 1, text.data(), text.size());
      return true;
    }
    case Kind::Other:
      return false;
    default:
      break;
  }
  auto* words = reserve_words(argument.kind() == Kind::Complex ? 3 : 2);
  if (words == nullptr) return false;
  words[1] = 0;
  switch (argument.kind()) {
    case Kind::Integer:
      words[0] = tagged(KeyTag::Integer, 0);
      words[1] = static_cast<uint64_t>(argument.integer());
      break;
    case Kind::Bool:
      words[0] = tagged(KeyTag::Boolean, argument.integer() != 0 ? 1 : 0);
      break;
    case Kind::Real:
      words[0] = tagged(KeyTag::Real, 0);
      words[1] = bits(argument.real());
      break;
    case Kind::Complex:
      words[0] = tagged(KeyTag::Complex, 0);
      words[1] = bits(argument.real());
      words[2] = bits(argument.imaginary());
      break;
    case Kind::Device:
      words[0] = tagged(KeyTag::Device, 0);
      // The type, and the index, which is -1 where there is none: see Argument.
      words[1] = static_cast<uint64_t>(portable_ ? (argument.integer() + 128) / 256 * 256
                                                 : argument.integer());
      break;
    default:
      words[0] = tagged(KeyTag::None, 0);
      break;
  }
  return true;
}

namespace {

// In a torch that has named tensors, such as 2.11, composite ops such as softmax switch names off
// for the ops that they call. A call whose tensors have no names is the same then.
template <typename Key>
decltype(Key::Named, c10::DispatchKeySet()) without_names(c10::DispatchKeySet keys, int) {
  return keys.remove(Key::Named);
}

template <typename Key>
c10::DispatchKeySet without_names(c10::DispatchKeySet keys, long) {
  return keys;
}

}  // namespace

void PlanKey::add_thread(c10::DispatchKeySet keyset) noexcept {
  const auto thread = c10::impl::tls_local_dispatch_key_set();
  auto* words = reserve_words(4);
  words[0] = thread.included_.raw_repr();
  words[1] = without_names<c10::DispatchKey>(thread.excluded_, 0).raw_repr();
  words[2] = (c10::GradMode::is_enabled() ? 1 : 0) |
             static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 8;
  words[3] = keyset.raw_repr();
  if (C10_UNLIKELY(!thread.excluded_.has_all(c10::autocast_dispatch_keyset))) {
    // The dispatch keys tell which of them apply.
    static_assert(std::size(kAutocast) == sizeof(uint64_t));
    auto* dtypes = reinterpret_cast<uint8_t*>(reserve_words(1));
    for (const auto device : kAutocast) {
      *dtypes++ = static_cast<uint8_t>(at::autocast::get_autocast_dtype(device));
    }
  }
  thread_words_ = size_;
}

bool PlanKey::read(c10::ArrayRef<Argument> arguments, c10::DispatchKeySet keyset) noexcept {
  add_thread(keyset);
  for (const Argument& argument : arguments) {
    if (!add(argument)) return false;
  }
  // Two independent chains, because a multiplication's latency is longer than its throughput.
  uint64_t even = 0x9E3779B97F4A7C15ull;
  uint64_t odd = 0xC2B2AE3D27D4EB4Full;
  for (size_t i = 0; i < size_; i += 2) {
    even = (even ^ words_[i]) * 0xFF51AFD7ED558CCDull;
    even ^= even >> 32;
    if (i + 1 < size_) {
      odd = (odd ^ words_[i + 1]) * 0xC4CEB9FE1A85EC53ull;
      odd ^= odd >> 32;
    }
  }
  hash_ = (even ^ odd << 1) * 0xFF51AFD7ED558CCDull;
  hash_ ^= hash_ >> 32;
  return true;
}

bool PlanKey::operator==(const std::vector<uint64_t>& words) const noexcept {
  return words.size() == size_ &&
         std::memcmp(words.data(), words_.data(), size_ * sizeof(uint64_t)) == 0;
}

bool PlanKey::has_same_arguments(const PlanKey& other) const noexcept {
  return std::equal(words_.begin() + thread_words_, words_.begin() + size_,
                    other.words_.begin() + other.thread_words_, other.words_.begin() + other.size_);
}

// --------------------------------------------------------------------------- Fingerprint

void Fingerprint::add(const std::string& text) {
  add(text.size());
  add(text.data(), text.size());
}

void Fingerprint::add(const std::vector<int64_t>& numbers) {
  add(numbers.size());
  for (const int64_t number : numbers) add(static_cast<uint64_t>(number));
}

void Fingerprint::add(const Pointer& pointer) {
  add(static_cast<uint64_t>(pointer.base));
  add(static_cast<uint64_t>(pointer.argument.index));
  add(static_cast<uint64_t>(pointer.argument.item));
  add(static_cast<uint64_t>(pointer.memory));
  add(static_cast<uint64_t>(pointer.offset));
}

void Fingerprint::add(const View& view) {
  add(view.pointer);
  add(static_cast<uint64_t>(view.dtype));
  add(view.sizes);
  add(view.strides);
}

// Not by printing it: a library with a C++ runtime of its own, such as CuteDSL's, replaces the
// streams, and printing a number then crashes (seen on torch 2.11 with FlashAttention-4).
void Fingerprint::add(const c10::IValue& constant) {
  add(constant.tagKind());
  if (constant.isTensor()) {  // a number that is passed to an op as a tensor
    if (constant.toTensor().defined()) add(constant.toTensor().toString());
    if (constant.toTensor().defined()) add(c10::IValue(constant.toTensor().item()));
  } else if (constant.isList()) {
    add(constant.toListRef().size());
    for (const c10::IValue& item : constant.toListRef()) add(item);
  } else if (constant.isDouble()) {
    add(bits(constant.toDouble()));
  } else if (constant.isComplexDouble()) {
    add(bits(constant.toComplexDouble().real()));
    add(bits(constant.toComplexDouble().imag()));
  } else if (constant.isInt()) {  // an enumeration of torch's, too
    add(static_cast<uint64_t>(constant.toInt()));
  } else if (constant.isBool()) {
    add(static_cast<uint64_t>(constant.toBool()));
  } else if (constant.isString()) {
    add(constant.toStringRef());
  } else if (constant.isDevice()) {
    add(static_cast<uint64_t>(constant.toDevice().type()));
    add(static_cast<uint64_t>(constant.toDevice().index()));
  } else if (constant.isPtrType()) {  // only its identity can be compared
    add(reinterpret_cast<uint64_t>(constant.internalToPointer()));
  }
}

void Fingerprint::add(const Operand& operand) {
  add(static_cast<uint64_t>(operand.kind));
  switch (operand.kind) {
    case Operand::Kind::Constant:
      add(operand.constant);
      break;
    case Operand::Kind::Argument:
      add(static_cast<uint64_t>(operand.argument.index));
      add(static_cast<uint64_t>(operand.argument.item));
      break;
    case Operand::Kind::Result:
      add(static_cast<uint64_t>(operand.memory));
      break;
    case Operand::Kind::View:
      add(*operand.view);
      break;
    case Operand::Kind::List:
      add(operand.items.size());
      for (const Operand& item : operand.items) add(item);
      break;
  }
}

void visit(const Operand& operand, const Step::Visitor& visitor) {
  if (operand.kind == Operand::Kind::Result) visitor(operand.memory, true);
  if (operand.kind == Operand::Kind::View && operand.view->pointer.base == Pointer::Base::Memory) {
    visitor(operand.view->pointer.memory, true);
  }
  for (const Operand& item : operand.items) visit(item, visitor);
}

// --------------------------------------------------------------------------- Allocation

void Allocation::run(Replay& replay) const {
  Memory& memory = replay.memory(memory_);
  c10::DataPtr data = allocator_->allocate(nbytes_);
  memory.address = static_cast<char*>(data.get());
  if (C10_LIKELY(!as_storage_ && !replay.poison())) {
    memory.data = std::move(data);
    return;
  }
  memory.storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes_, std::move(data), allocator_,
      /*resizable=*/true));
  if (C10_UNLIKELY(replay.poison().has_value()) && nbytes_ > 0) {
    View all;
    all.pointer.base = Pointer::Base::Memory;
    all.pointer.memory = memory_;
    all.dtype = c10::kByte;
    all.sizes = {static_cast<int64_t>(nbytes_)};
    all.contiguous = true;
    replay.tensor(all).fill_(*replay.poison());
  }
}

void Allocation::describe(Fingerprint& fingerprint) const {
  fingerprint.add(std::string("allocate"));
  fingerprint.add(static_cast<uint64_t>(memory_));
  fingerprint.add(nbytes_);
  fingerprint.add(reinterpret_cast<uint64_t>(allocator_));
}

std::string Allocation::text() const { return "allocate " + std::to_string(nbytes_) + " bytes"; }

// --------------------------------------------------------------------------- Replay

void* Replay::stream() {
  if (!stream_) {
    stream_ = nullptr;
    if (!device_.is_cpu()) {
      const auto* backend = c10::impl::getDeviceGuardImpl(device_.type());
      stream_ = backend->getStreamNativeHandle(backend->getStream(device_));
    }
  }
  return *stream_;
}

char* Replay::address(const Pointer& pointer) {
  switch (pointer.base) {
    case Pointer::Base::Null:
      return nullptr;
    case Pointer::Base::Argument: {
      // As Python's `data_ptr()` does: it materializes a copy-on-write tensor.
      return static_cast<char*>(argument(pointer.argument)->mutable_data()) + pointer.offset;
    }
    case Pointer::Base::Memory:
      return memory(pointer.memory).address + pointer.offset;
  }
  return nullptr;
}

at::Tensor Replay::tensor(const View& view) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(view.dtype));
  int64_t offset = view.pointer.offset;
  c10::Storage storage;
  if (view.pointer.base == Pointer::Base::Argument) {
    const auto* tensor = argument(view.pointer.argument);
    storage = tensor->storage();
    offset += tensor->storage_offset() * static_cast<int64_t>(tensor->itemsize());
  } else {
    const Memory& from = memory(view.pointer.memory);
    storage = from.result.defined() ? from.result.storage() : from.storage;
  }
  if (C10_UNLIKELY(offset % itemsize != 0)) {  // the storage may begin at any byte
    throw LaunchError({__func__, __FILE__, __LINE__},
                      "an argument's memory is not aligned to the dtype that it is viewed as");
  }
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(view.dtype, c10::kStrided, device_)),
      c10::scalarTypeToTypeMeta(view.dtype));
  auto* impl = result.unsafeGetTensorImpl();
  if (view.contiguous && offset == 0) {
    impl->set_sizes_contiguous(view.sizes);
  } else {
    impl->set_sizes_and_strides(view.sizes, view.strides, offset / itemsize);
  }
  return result;
}

c10::IValue Replay::value(const Operand& operand) {
  switch (operand.kind) {
    case Operand::Kind::Constant:
      return operand.constant;
    case Operand::Kind::Argument:
      return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
          argument(operand.argument)));
    case Operand::Kind::Result:
      return memory(operand.memory).result;
    case Operand::Kind::View:
      return tensor(*operand.view);
    case Operand::Kind::List: {
      c10::impl::GenericList list(operand.constant.toList().elementType());
      for (const Operand& item : operand.items) list.push_back(value(item));
      return list;
    }
  }
  return {};
}

// --------------------------------------------------------------------------- Plan

Plan::Plan(c10::Device device, std::vector<std::unique_ptr<Step>> steps,
           std::vector<Operand> outputs, size_t memories, bool watches_hooks, PythonRef keep_alive)
    : device_(device),
      outputs_(std::move(outputs)),
      memories_(memories),
      watches_hooks_(watches_hooks),
      keep_alive_(std::move(keep_alive)) {
  schedule(std::move(steps));
  Fingerprint fingerprint;
  for (const Scheduled& each : steps_) each.step->describe(fingerprint);
  fingerprint.add(outputs_.size());
  for (const Operand& output : outputs_) fingerprint.add(output);
  fingerprint_ = fingerprint.text();
}

void Plan::schedule(std::vector<std::unique_ptr<Step>> steps) {
  constexpr size_t kNever = SIZE_MAX;
  std::vector<size_t> last(memories_, kNever);
  std::vector<bool> as_tensor(memories_, false);
  for (size_t index = 0; index < steps.size(); ++index) {
    const bool allocates = dynamic_cast<Allocation*>(steps[index].get()) != nullptr;
    steps[index]->visit([&](int32_t memory, bool tensor) {
      if (allocates) return;
      last[static_cast<size_t>(memory)] = index;
      if (tensor) as_tensor[static_cast<size_t>(memory)] = true;
    });
  }
  for (const Operand& output : outputs_) {
    visit(output, [&](int32_t memory, bool) {
      last[static_cast<size_t>(memory)] = steps.size();
      as_tensor[static_cast<size_t>(memory)] = true;
    });
  }
  for (size_t index = 0; index < steps.size(); ++index) {
    if (auto* allocation = dynamic_cast<Allocation*>(steps[index].get())) {
      const auto memory = static_cast<size_t>(allocation->memory());
      if (last[memory] == kNever) continue;  // it is not used
      if (as_tensor[memory]) allocation->need_storage();
    }
    Scheduled scheduled{std::move(steps[index]), {}};
    for (size_t memory = 0; memory < memories_; ++memory) {
      if (last[memory] == index) scheduled.releases.push_back(static_cast<int32_t>(memory));
    }
    steps_.push_back(std::move(scheduled));
  }
}

void Plan::replay(const Argument* arguments, torch::jit::Stack& results,
                  std::optional<uint8_t> poison) const {
  Replay replay(arguments, device_, memories_, poison);
  for (const Scheduled& each : steps_) {
    each.step->run(replay);
    // Freed as early as possible, so that a later allocation can reuse it, in stream order.
    for (const int32_t memory : each.releases) replay.memory(memory) = Memory();
  }
  results.reserve(results.size() + outputs_.size());
  for (const Operand& output : outputs_) results.push_back(replay.value(output));
}

std::string Plan::text() const {
  std::string text;
  for (const Scheduled& each : steps_) {
    if (!text.empty()) text += "; ";
    text += each.step->text();
  }
  return text;
}

size_t Plan::launches() const noexcept {
  return static_cast<size_t>(std::count_if(
      steps_.begin(), steps_.end(), [](const Scheduled& each) { return each.step->is_launch(); }));
}

size_t Plan::bytes() const noexcept {
  size_t bytes = sizeof(*this) + fingerprint_.capacity() + outputs_.size() * sizeof(Operand);
  for (const Scheduled& each : steps_) {
    bytes += sizeof(each) + each.step->bytes() + each.releases.size() * sizeof(int32_t);
  }
  return bytes;
}

size_t PlanEntry::bytes() const noexcept {
  return sizeof(*this) + key.size() * sizeof(uint64_t) + label.capacity() + plan->bytes();
}

// --------------------------------------------------------------------------- PlanTable

struct PlanTable::KeyHistory {
  KeyTable<1024> seen;
  KeyTable<1024> refused;
  KeyTable<4096> ready;
  KeyTable<4096> asked;
};

// It takes 160 KB, and most overrides get no call in most processes.
const PlanTable::KeyHistory& PlanTable::history() const noexcept {
  static constinit const KeyHistory empty{};
  const KeyHistory* history = history_.load(std::memory_order_acquire);
  return history == nullptr ? empty : *history;
}

PlanTable::KeyHistory* PlanTable::writable_history() noexcept {
  KeyHistory* history = history_.load(std::memory_order_acquire);
  if (C10_LIKELY(history != nullptr)) return history;
  std::unique_ptr<KeyHistory> created(new (std::nothrow) KeyHistory());
  // If another thread was faster, this sets `history` to what that one has created.
  if (!history_.compare_exchange_strong(history, created.get(), std::memory_order_acq_rel))
    return history;
  return created.release();
}

PlanTable::PlanTable(PlanLimits limits)
    : limits_(limits),
      snapshot_(new Snapshot{1, {{0, nullptr}, {0, nullptr}}}),
      update_every_(std::clamp<uint64_t>(limits.replays_per_recording / 4, 1, 256)),
      given_up_(limits.refusals == 0) {}

PlanTable::~PlanTable() {
  // Every possible reader holds a reference to the table.
  delete snapshot_.load(std::memory_order_relaxed);
  delete history_.load(std::memory_order_relaxed);
}

const PlanEntry* PlanTable::find(const PlanKey& key) const noexcept {
  const Snapshot& snapshot = *snapshot_.load(std::memory_order_seq_cst);
  for (uint64_t slot = key.hash() & snapshot.mask;; slot = (slot + 1) & snapshot.mask) {
    const auto& [hash, entry] = snapshot.slots[slot];
    if (entry == nullptr) return nullptr;
    if (hash == key.hash() && key == entry->key) {
      return C10_LIKELY(!entry->plan->is_inherited()) ? entry : nullptr;
    }
  }
}

PlanTable::Action PlanTable::action_for(const PlanKey& key) const noexcept {
  if (given_up() || history().refused.count(key.hash()) > 0) return Action::Refused;
  if (stopped()) return Action::Stopped;
  return history().seen.count(key.hash()) > 0 ? Action::Record : Action::Wait;
}

void PlanTable::note_seen(const PlanKey& key) noexcept {
  if (KeyHistory* history = writable_history()) history->seen.add(key.hash());
}

bool PlanTable::is_ready(const PlanKey& key) const noexcept {
  return history().ready.count(key.hash()) > 0;
}

void PlanTable::set_ready(const PlanKey& key) noexcept {
  KeyHistory* history = writable_history();
  if (history == nullptr) return;
  history->ready.add(key.hash());
  // If the key is forgotten later, it must be asked for again, and not be waited for.
  history->asked.forget(key.hash());
}

bool PlanTable::is_asked(const PlanKey& key) const noexcept { return times_asked(key) > 0; }

uint32_t PlanTable::times_asked(const PlanKey& key) const noexcept {
  return history().asked.count(key.hash());
}

void PlanTable::forget(const PlanKey& key) noexcept {
  if (KeyHistory* history = history_.load(std::memory_order_acquire))
    history->asked.forget(key.hash());
}

void PlanTable::set_asked(const PlanKey& key) noexcept {
  if (KeyHistory* history = writable_history()) history->asked.add(key.hash());
}

void PlanTable::forget_asked() noexcept {
  if (KeyHistory* history = history_.load(std::memory_order_acquire)) history->asked.clear();
}

void PlanTable::update_stopped() noexcept {
  const uint64_t recordings = this->recordings();
  const uint64_t earned = replays_.total() / limits_.replays_per_recording;
  stopped_.store(
      recordings >= limits_.free_recordings && recordings - limits_.free_recordings >= earned,
      std::memory_order_relaxed);
}

bool PlanTable::install(const PlanKey& key, std::shared_ptr<const Plan> plan, std::string label,
                        uint64_t generation, bool proven) {
  auto entry = std::make_shared<PlanEntry>();
  entry->hash = key.hash();
  entry->key.assign(key.words(), key.words() + key.size());
  entry->plan = std::move(plan);
  entry->label = std::move(label);
  entry->proven.store(proven, std::memory_order_relaxed);
  Garbage garbage;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (generation != generation_.load(std::memory_order_relaxed)) return false;
    const auto known = std::find_if(entries_.begin(), entries_.end(), [&](const auto& other) {
      return other->hash == key.hash() && key == other->key;
    });
    if (known != entries_.end()) {
      if (!(*known)->plan->is_inherited()) return true;  // another thread was faster
      garbage.entries.push_back(std::move(*known));
      entries_.erase(known);
    }
    if (entries_.size() >= limits_.plans) garbage.entries.push_back(evict());
    entries_.push_back(std::move(entry));
    ever_installed_.store(true, std::memory_order_relaxed);
    garbage.snapshot.reset(publish());
  }
  retire(std::move(garbage));
  return true;
}

bool PlanTable::prove(const PlanKey& key) const noexcept {
  const Epochs::Reader reader;
  const PlanEntry* entry = find(key);
  if (entry != nullptr) entry->proven.store(true, std::memory_order_release);
  return entry != nullptr;
}

void PlanTable::refuse(const PlanKey& key) {
  if (KeyHistory* history = writable_history()) history->refused.add(key.hash());
  const uint32_t refusals = refusals_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (refusals >= limits_.refusals && !ever_installed_.load(std::memory_order_relaxed)) {
    given_up_.store(true, std::memory_order_relaxed);
  }
}

void PlanTable::drop(const PlanKey& key) {
  if (KeyHistory* history = writable_history()) history->refused.add(key.hash());
  Garbage garbage;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto last = std::partition(entries_.begin(), entries_.end(), [&](const auto& entry) {
      return entry->hash != key.hash() || !(key == entry->key);
    });
    if (last == entries_.end()) return;
    std::move(last, entries_.end(), std::back_inserter(garbage.entries));
    entries_.erase(last, entries_.end());
    garbage.snapshot.reset(publish());
  }
  retire(std::move(garbage));
}

void PlanTable::clear() {
  Garbage garbage;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    generation_.fetch_add(1, std::memory_order_relaxed);
    const auto now = std::chrono::steady_clock::now();
    if (!refilled_ || now - *refilled_ >= limits_.refill) {
      refilled_ = now;
      recordings_.store(replays_.total() / limits_.replays_per_recording,
                        std::memory_order_relaxed);
    }
    update_stopped();
    if (entries_.empty()) return;
    garbage.entries = std::move(entries_);
    entries_.clear();
    garbage.snapshot.reset(publish());
  }
  retire(std::move(garbage));
}

std::vector<std::shared_ptr<const PlanEntry>> PlanTable::entries() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::vector<std::shared_ptr<const PlanEntry>> own;
  std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(own),
               [](const auto& entry) { return !entry->plan->is_inherited(); });
  return own;
}

const PlanTable::Snapshot* PlanTable::publish() {
  size_t size = 2;
  while (size < entries_.size() * 2 + 1) size *= 2;
  auto fresh = std::make_unique<Snapshot>();
  fresh->mask = size - 1;
  fresh->slots.assign(size, {0, nullptr});
  for (const auto& entry : entries_) {
    uint64_t slot = entry->hash & fresh->mask;
    while (fresh->slots[slot].second != nullptr) slot = (slot + 1) & fresh->mask;
    fresh->slots[slot] = {entry->hash, entry.get()};
  }
  has_plans_.store(!entries_.empty(), std::memory_order_relaxed);
  return snapshot_.exchange(fresh.release(), std::memory_order_seq_cst);
}

std::shared_ptr<const PlanEntry> PlanTable::evict() {
  auto least = entries_.begin();
  uint64_t fewest = UINT64_MAX;
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    const uint64_t total = (*entry)->replays.total();
    const uint64_t since = total - (*entry)->replays_before;
    (*entry)->replays_before = total;
    if (since < fewest) {
      fewest = since;
      least = entry;
    }
  }
  auto evicted = std::move(*least);
  entries_.erase(least);
  // The next call asks for it again: it was loaded, and nothing need be recorded.
  if (KeyHistory* history = history_.load(std::memory_order_acquire))
    history->asked.forget(evicted->hash);
  return evicted;
}

void PlanTable::retire(Garbage garbage) {
  // In a shared_ptr, because a std::function must be copyable.
  Epochs::instance().retire([held = std::make_shared<Garbage>(std::move(garbage))] { (void)held; });
}

}  // namespace opgraft
