#include "condition.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

namespace opgraft {

namespace {

constexpr size_t kDevices = 64;

std::atomic<CapabilityLookup> capability_lookup{nullptr};

// An entry is 0 if unknown, else the capability plus 2: then -1 (none) differs from 0, and
// kUnknownCapability does not.
std::array<std::atomic<int64_t>, kDevices> capabilities{};

// The value of an argument or item; None if the list is None or too short.
Argument value_of(const ArgumentRef& ref, const Argument* arguments) {
  const Argument& value = arguments[ref.position];
  if (C10_LIKELY(!ref.is_item)) return value;
  if (!value.is_list()) return {};
  const auto size = static_cast<int64_t>(value.size());
  const int64_t index = ref.item < 0 ? ref.item + size : ref.item;
  return index >= 0 && index < size ? value.item(static_cast<size_t>(index)) : Argument();
}

// The tensor that is an argument or item; nullptr if it is none.
const c10::TensorImpl* tensor_of(const ArgumentRef& ref, const Argument* arguments) {
  if (C10_LIKELY(!ref.is_item)) return arguments[ref.position].tensor();
  return value_of(ref, arguments).tensor();
}

int64_t device_capability(c10::DeviceIndex index) {
  if (index < 0 || static_cast<size_t>(index) >= kDevices) return -1;
  auto& known = capabilities[static_cast<size_t>(index)];
  const int64_t entry = known.load(std::memory_order_relaxed);
  if (C10_LIKELY(entry != 0)) return entry - 2;
  const auto lookup = capability_lookup.load();
  if (lookup == nullptr) return -1;
  const int64_t found = lookup(index);
  known.store(found + 2, std::memory_order_relaxed);
  return found;
}

template <class T>
bool compares_as(Code code, T left, T right) {
  switch (code) {
    case Code::Less:
      return left < right;
    case Code::LessEqual:
      return left <= right;
    case Code::Equal:
      return left == right;
    case Code::NotEqual:
      return left != right;
    case Code::GreaterEqual:
      return left >= right;
    case Code::Greater:
      return left > right;
    default:
      TORCH_INTERNAL_ASSERT(false, "not a comparison: ", static_cast<int>(code));
  }
}

// As in Python. False where there is no result.
inline bool floor_divide(int64_t a, int64_t b, int64_t* result) {
  if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
  const auto both = static_cast<uint64_t>(a | b);
  if (C10_LIKELY(both <= UINT32_MAX)) {  // what a processor divides faster
    *result = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return true;
  }
  *result = a / b - static_cast<int64_t>(a % b != 0 && (a % b < 0) != (b < 0));
  return true;
}

inline bool floor_modulo(int64_t a, int64_t b, int64_t* result) {
  if (b == 0) return false;
  const int64_t rest = b == -1 ? 0 : a % b;
  *result = rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  return true;
}

Truth to_truth(bool value) { return value ? Truth::True : Truth::False; }

// --------------------------------------------------------------------------- properties of a
// tensor

// Used by tests and by nodes.

// `dtypes`: a bit for each ScalarType.
inline bool has_dtype(const c10::TensorImpl& tensor, int64_t dtypes) {
  const auto type = static_cast<unsigned>(c10::typeMetaToScalarType(tensor.dtype()));
  return type < 64 && (static_cast<uint64_t>(dtypes) >> type & 1) != 0;
}

inline bool is_contiguous(const c10::TensorImpl& tensor, int64_t memory_format) {
  return tensor.is_contiguous(static_cast<c10::MemoryFormat>(memory_format));
}

// The size or stride of a dimension, counted from the end if negative; null if there is no such
// dimension.
inline const int64_t* at_dim(c10::IntArrayRef values, int64_t dim) {
  const auto dims = static_cast<int64_t>(values.size());
  if (dim < 0) dim += dims;
  return dim >= 0 && dim < dims ? &values[static_cast<size_t>(dim)] : nullptr;
}

}  // namespace

uintptr_t first_address(const c10::TensorImpl& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto base = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return base + static_cast<uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
}

void set_capability_lookup(CapabilityLookup lookup) { capability_lookup.store(lookup); }

// --------------------------------------------------------------------------- lookups

inline int64_t Grid::Axis::index_of(int64_t number) const {
  if (is_exact) {
    // There are a few: for them `std::find`, which is unrolled, takes longer.
    for (const int64_t& each : numbers) {
      if (each == number) return &each - numbers.data();
    }
    return -1;
  }
  if (number < 1) return -1;
  const int octave = 63 - __builtin_clzll(static_cast<uint64_t>(number));
  // The number's first `shift + 1` binary digits: the octave's first one, and the part of it.
  const int64_t digits = octave >= shift ? number >> (octave - shift) : number << (shift - octave);
  const int64_t index =
      (static_cast<int64_t>(octave) << shift) + digits - (int64_t{1} << shift) - first;
  if (is_open_ended) return std::clamp<int64_t>(index, 0, count - 1);
  return index >= 0 && index < count ? index : -1;
}

Lookup::~Lookup() {
  for (auto& each : grids_) delete each.load();
}

inline const Grid* Lookup::grid(c10::Device device) const {
  const auto slot = static_cast<size_t>(device.index() + 1);
  if (C10_UNLIKELY(slot >= kGrids)) return nullptr;
  const Grid* known = grids_[slot].load(std::memory_order_acquire);
  if (C10_UNLIKELY(known == nullptr)) known = find(device, grids_[slot]);
  return known == nullptr || known->cells.empty() ? nullptr : known;
}

C10_NOINLINE const Grid* Lookup::find(c10::Device device, std::atomic<const Grid*>& known) const {
  auto found = source_(device);
  if (found == nullptr) return nullptr;
  const Grid* expected = nullptr;
  // Another thread may have found it meanwhile. Then this one's is dropped.
  if (known.compare_exchange_strong(expected, found.get())) return found.release();
  return expected;
}

struct Condition::Number {
  enum Kind : uint8_t { Undefined, Integer, Real, Complex } kind = Undefined;
  int64_t integer = 0;
  double real = 0;
  double imaginary = 0;

  static Number of(int64_t value) { return {Integer, value, 0, 0}; }
  static Number of_real(double value) { return {Real, 0, value, 0}; }

  static Number of(const Argument& value) {
    switch (value.kind()) {
      case Argument::Kind::Integer:
      case Argument::Kind::Bool:
        return of(value.integer());
      case Argument::Kind::Real:
        return of_real(value.real());
      case Argument::Kind::Complex:
        return {Complex, 0, value.real(), value.imaginary()};
      default:
        return {};
    }
  }

  // Exact, as Python compares int with float: long double represents every int64 and every double.
  long double exact() const {
    return kind == Integer ? static_cast<long double>(integer) : static_cast<long double>(real);
  }
};

Condition::Condition(std::vector<Node> nodes, int32_t root) {
  const auto size = static_cast<int32_t>(nodes.size());
  TORCH_CHECK(root >= 0 && root < size, "a condition's root is one of its nodes");
  for (int32_t index = 0; index < size; ++index) {
    Node& node = nodes[static_cast<size_t>(index)];
    Instruction instruction{node.code, node.argument_ref, node.integer, node.real, 0, 0};
    if (node.code == Code::SameDtype || node.code == Code::SameDevice) {
      instruction.first = static_cast<int32_t>(argument_refs_.size());
      instruction.count = static_cast<int32_t>(node.argument_refs.size());
      argument_refs_.insert(argument_refs_.end(), node.argument_refs.begin(),
                            node.argument_refs.end());
    } else {
      instruction.first = static_cast<int32_t>(children_.size());
      instruction.count = static_cast<int32_t>(node.children.size());
      children_.insert(children_.end(), node.children.begin(), node.children.end());
    }
    if (node.code == Code::ValueIs || node.code == Code::ValueIsNot) {
      instruction.integer = static_cast<int64_t>(constants_.size());
      constants_.push_back(std::move(node.constant));
    }
    if (node.code == Code::Lookup) {
      TORCH_CHECK(node.lookup != nullptr, "a lookup has a table");
      instruction.integer = static_cast<int64_t>(lookups_.size());
      lookups_.push_back(std::move(node.lookup));
    }
    for (const int32_t child : node.children) {
      TORCH_CHECK(child >= 0 && child < index, "a condition's nodes come after their children");
    }
    if (node.code == Code::Lookup) numbers_.push_back(numbers_of(instruction));
    nodes_.push_back(instruction);
  }
  const Instruction& whole = nodes_[static_cast<size_t>(root)];
  if (whole.code != Code::All) {
    tests_.push_back(test_of(root));
  } else {
    for (int32_t which = 0; which < whole.count; ++which) {
      tests_.push_back(test_of(children_[static_cast<size_t>(whole.first + which)]));
    }
  }
  make_tensor_test();
  // Tests have no side effects, and all must pass, so their order does not matter.
  const auto rest = std::stable_partition(
      tests_.begin(), tests_.end(), [](const Test& test) { return test.kind != Test::Kind::Node; });
  quick_count_ = is_decided_by_key() ? static_cast<size_t>(rest - tests_.begin()) : tests_.size();
}

bool Condition::is_decided_by_key() const {
  return std::none_of(nodes_.begin(), nodes_.end(), [](const Instruction& node) {
    return node.code == Code::Aligned && kKeyAlignment % static_cast<uintptr_t>(node.integer) != 0;
  });
}

Condition::Test Condition::test_of(int32_t index) const {
  const Instruction& node = nodes_[static_cast<size_t>(index)];
  Test test;
  test.node = index;
  test.argument = static_cast<uint16_t>(node.argument_ref.position);
  test.integer = node.integer;
  const auto is_one_of = [](const Instruction& what, Code code) {
    // One with a child is of a dimension that an argument names.
    return what.code == code && !what.argument_ref.is_item && what.count == 0;
  };
  if (is_one_of(node, Code::Dtype)) test.kind = Test::Kind::Dtype;
  if (is_one_of(node, Code::Contiguous)) test.kind = Test::Kind::Contiguous;
  if (node.code < Code::Less || node.code > Code::Greater) return test;
  const Instruction& left = child(node, 0);
  const Instruction& right = child(node, 1);
  if (right.code != Code::Integer) return test;
  if (is_one_of(left, Code::Ndim)) test.kind = Test::Kind::Ndim;
  if (is_one_of(left, Code::Size)) test.kind = Test::Kind::Size;
  if (is_one_of(left, Code::Numel)) test.kind = Test::Kind::Numel;
  if (is_one_of(left, Code::Value)) test.kind = Test::Kind::Value;
  test.argument = static_cast<uint16_t>(left.argument_ref.position);
  test.integer = left.integer;
  test.constant = right.integer;
  for (const int64_t relation : {-1, 0, 1}) {
    if (compares_as<int64_t>(node.code, relation, 0)) test.relation |= 1 << (relation + 1);
  }
  return test;
}

// --------------------------------------------------------------------------- the main tensor

namespace {

// The numbers that stand in one of the relations (bits as in `Test::relation`) to a constant; all
// numbers if they are no range.
TensorTest::Range range_of(uint8_t relation, int64_t constant) {
  constexpr int kLess = 1, kEqual = 2, kGreater = 4;
  TensorTest::Range range;
  if ((relation & kGreater) == 0) range.most = constant;
  if ((relation & kLess) == 0) range.least = constant;
  const TensorTest::Range none{INT64_MAX, INT64_MIN};
  if (relation == kLess)
    return constant == INT64_MIN ? none : TensorTest::Range{INT64_MIN, constant - 1};
  if (relation == kGreater)
    return constant == INT64_MAX ? none : TensorTest::Range{constant + 1, INT64_MAX};
  return range;
}

TensorTest::Range common(const TensorTest::Range& one, const TensorTest::Range& other) {
  return {std::max(one.least, other.least), std::min(one.most, other.most)};
}

TensorTest::Range around(const TensorTest::Range& one, const TensorTest::Range& other) {
  return {std::min(one.least, other.least), std::max(one.most, other.most)};
}

}  // namespace

void TensorTest::widen(const TensorTest& other) {
  if (argument != other.argument) {
    *this = {};
    return;
  }
  contiguous = contiguous && other.contiguous;
  has_size = has_size && other.has_size && dim == other.dim;
  dtypes |= other.dtypes;
  ranks |= other.ranks;
  numel = around(numel, other.numel);
  size = around(size, other.size);
}

void Condition::make_tensor_test() {
  using Kind = Test::Kind;
  constexpr uint8_t kNotEqual = 5, kEqual = 2;
  const auto is_held = [](const Test& test) {
    switch (test.kind) {
      case Kind::Dtype:
        return true;
      case Kind::Contiguous:
        return test.integer == static_cast<int64_t>(c10::MemoryFormat::Contiguous);
      case Kind::Ndim:
        return test.constant >= 0 && test.constant < TensorTest::kRanks;
      case Kind::Numel:
        return test.relation != kNotEqual;
      case Kind::Size:
        return test.relation != kNotEqual && test.integer == static_cast<int32_t>(test.integer);
      default:
        return false;
    }
  };
  // The argument with most tests; of several the first one.
  std::vector<int> counts;
  for (const Test& test : tests_) {
    if (!is_held(test)) continue;
    counts.resize(std::max<size_t>(counts.size(), size_t{test.argument} + 1));
    ++counts[test.argument];
  }
  if (counts.empty() || counts.size() > INT16_MAX) return;
  TensorTest& made = tensor_test_;
  made.argument =
      static_cast<int16_t>(std::max_element(counts.begin(), counts.end()) - counts.begin());
  // One dimension has a place: one whose size must be a certain number, if there is any.
  for (const bool equal : {true, false}) {
    for (const Test& test : tests_) {
      if (made.has_size || test.kind != Kind::Size || test.argument != made.argument) continue;
      if (!is_held(test) || (equal && test.relation != kEqual)) continue;
      made.has_size = true;
      made.dim = static_cast<int32_t>(test.integer);
    }
  }
  const auto move = [&](const Test& test) {
    if (test.argument != made.argument || !is_held(test)) return false;
    const auto range = range_of(test.relation, test.constant);
    switch (test.kind) {
      case Kind::Dtype:
        made.dtypes &= static_cast<uint64_t>(test.integer);
        return true;
      case Kind::Contiguous:
        return made.contiguous = true;
      case Kind::Ndim:
        for (int64_t rank = 0; rank <= TensorTest::kRanks; ++rank) {
          if (range.contains(rank) == 0 || (test.relation == kNotEqual && rank == test.constant))
            made.ranks &= ~(1ULL << rank);
        }
        return true;
      case Kind::Numel:
        made.numel = common(made.numel, range);
        return true;
      default:
        if (test.integer != made.dim) return false;
        made.size = common(made.size, range);
        return true;
    }
  };
  tests_.erase(std::remove_if(tests_.begin(), tests_.end(), move), tests_.end());
}

bool Condition::passes(const Argument* arguments, size_t from, size_t to) const {
  for (size_t which = from; which < to; ++which) {
    if (!passes(tests_[which], arguments)) return false;
  }
  return true;
}

inline bool Condition::passes(const Test& test, const Argument* arguments) const {
  const auto compares = [&test](int64_t value) {
    const int relation = (value > test.constant) + (value >= test.constant);
    return (test.relation >> relation & 1) != 0;
  };
  const Argument& argument = arguments[test.argument];
  if (C10_UNLIKELY(test.kind <= Test::Kind::Value)) {
    if (test.kind == Test::Kind::Value && argument.kind() == Argument::Kind::Integer) {
      return compares(argument.integer());
    }
    const Instruction& node = nodes_[static_cast<size_t>(test.node)];
    if (node.code == Code::Lookup) return look_up(node, arguments) == Truth::True;
    return truth(node, arguments) == Truth::True;
  }
  const c10::TensorImpl* tensor = argument.tensor();
  if (C10_UNLIKELY(tensor == nullptr)) return false;
  switch (test.kind) {
    case Test::Kind::Dtype:
      return has_dtype(*tensor, test.integer);
    case Test::Kind::Contiguous:
      return is_contiguous(*tensor, test.integer);
    case Test::Kind::Ndim:
      return compares(tensor->dim());
    case Test::Kind::Numel:
      return compares(tensor->numel());
    default: {
      const int64_t* size = at_dim(tensor->sizes(), test.integer);
      return size != nullptr && compares(*size);
    }
  }
}

Truth Condition::truth(const Instruction& node, const Argument* arguments) const {
  switch (node.code) {
    case Code::All: {
      Truth result = Truth::True;
      for (int32_t which = 0; which < node.count; ++which) {
        const Truth part = truth(child(node, which), arguments);
        if (part == Truth::False) return Truth::False;
        if (part == Truth::Undefined) result = Truth::Undefined;
      }
      return result;
    }
    case Code::Any: {
      Truth result = Truth::False;
      for (int32_t which = 0; which < node.count; ++which) {
        const Truth part = truth(child(node, which), arguments);
        if (part == Truth::True) return Truth::True;
        if (part == Truth::Undefined) result = Truth::Undefined;
      }
      return result;
    }
    case Code::Not: {
      const Truth part = truth(child(node, 0), arguments);
      if (part == Truth::Undefined) return part;
      return to_truth(part == Truth::False);
    }
    case Code::Dtype: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      return tensor == nullptr ? Truth::Undefined : to_truth(has_dtype(*tensor, node.integer));
    }
    case Code::Contiguous: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      return tensor == nullptr ? Truth::Undefined : to_truth(is_contiguous(*tensor, node.integer));
    }
    case Code::Aligned: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      if (tensor == nullptr) return Truth::Undefined;
      return to_truth(first_address(*tensor) % static_cast<uintptr_t>(node.integer) == 0);
    }
    case Code::RequiresGrad: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      return tensor == nullptr ? Truth::Undefined : to_truth(tensor->requires_grad());
    }
    case Code::SameDtype:
    case Code::SameDevice: {
      bool same = true;
      const ArgumentRef* refs = argument_refs_.data() + node.first;
      const auto* first = tensor_of(refs[0], arguments);
      for (int32_t which = 0; which < node.count; ++which) {
        const auto* other = tensor_of(refs[which], arguments);
        if (first == nullptr || other == nullptr) return Truth::Undefined;
        same = same && (node.code == Code::SameDtype ? first->dtype() == other->dtype()
                                                     : first->device() == other->device());
      }
      return to_truth(same);
    }
    case Code::IsNone:
      return to_truth(arguments[node.argument_ref.position].is_none());
    case Code::ValueIs:
    case Code::ValueIsNot: {
      const Argument value = value_of(node.argument_ref, arguments);
      if (value.is_none()) return Truth::Undefined;
      const auto constant = Argument::of(constants_[static_cast<size_t>(node.integer)]);
      return to_truth(value.equals(constant) == (node.code == Code::ValueIs));
    }
    case Code::Lookup:
      return look_up(node, arguments);
    default:
      return compare(node, arguments);
  }
}

bool Condition::Numbers::Step::operator==(const Step& other) const {
  return code == other.code && shift == other.shift && left == other.left && right == other.right &&
         argument == other.argument && integer == other.integer;
}

Condition::Numbers Condition::numbers_of(const Instruction& lookup) const {
  Numbers made;
  for (int32_t which = 0; which < lookup.count; ++which) {
    const int8_t step = add_step(made, child(lookup, which));
    if (step < 0) return {};
    made.features.push_back(step);
  }
  return made;
}

int8_t Condition::add_step(Numbers& numbers, const Instruction& node) const {
  Numbers::Step step;
  step.code = node.code;
  step.integer = node.integer;
  switch (node.code) {
    case Code::Ndim:
    case Code::Numel:
    case Code::Itemsize:
    case Code::DtypeOf:
    case Code::Value:
    case Code::Size:
    case Code::Stride:
      if (node.argument_ref.is_item) return -1;
      step.argument = static_cast<uint16_t>(node.argument_ref.position);
      break;
    case Code::Integer:
    case Code::Add:
    case Code::Subtract:
    case Code::Multiply:
    case Code::FloorDivide:
    case Code::Modulo:
      break;
    default:
      return -1;
  }
  if (node.count > 0 && (step.left = add_step(numbers, child(node, 0))) < 0) return -1;
  if (node.count > 1) {
    const Instruction& right = child(node, 1);
    const bool divides = node.code == Code::FloorDivide || node.code == Code::Modulo;
    const int64_t by = right.integer;
    if (divides && right.code == Code::Integer && by > 0 && (by & (by - 1)) == 0) {
      step.shift = static_cast<int8_t>(__builtin_ctzll(static_cast<uint64_t>(by)));
    } else if ((step.right = add_step(numbers, right)) < 0) {
      return -1;
    }
  }
  auto& steps = numbers.steps;
  const auto known = std::find(steps.begin(), steps.end(), step);
  const auto place = static_cast<int8_t>(known - steps.begin());
  if (known != steps.end()) return place;
  if (steps.size() == Numbers::kMost) return -1;
  steps.push_back(step);
  return place;
}

// Overflow and division by zero are undefined.
Condition::Numbers::Outcome Condition::Numbers::evaluate(const Argument* arguments,
                                                         int64_t* values) const {
  int64_t* next = values;
  for (const Step& step : steps) {
    int64_t& value = *next++;
    switch (step.code) {
      case Code::Ndim:
      case Code::Numel:
      case Code::Itemsize:
      case Code::DtypeOf:
      case Code::Size:
      case Code::Stride: {
        const auto* tensor = arguments[step.argument].tensor();
        if (C10_UNLIKELY(tensor == nullptr)) return Outcome::Undefined;
        if (step.code == Code::Size || step.code == Code::Stride) {
          const auto found = step.code == Code::Size ? tensor->sizes() : tensor->strides();
          const int64_t* at = at_dim(found, step.left < 0 ? step.integer : values[step.left]);
          if (C10_UNLIKELY(at == nullptr)) return Outcome::Undefined;
          value = *at;
        } else if (step.code == Code::Numel) {
          value = tensor->numel();
        } else if (step.code == Code::Ndim) {
          value = tensor->dim();
        } else if (step.code == Code::DtypeOf) {
          value = static_cast<int64_t>(c10::typeMetaToScalarType(tensor->dtype()));
        } else {
          value = static_cast<int64_t>(tensor->itemsize());
        }
        continue;
      }
      case Code::Value: {
        const Argument& given = arguments[step.argument];
        if (given.is_none()) return Outcome::Undefined;
        if (given.kind() != Argument::Kind::Integer && given.kind() != Argument::Kind::Bool) {
          return Outcome::Others;
        }
        value = given.integer();
        continue;
      }
      case Code::Integer:
        value = step.integer;
        continue;
      default:
        break;
    }
    const int64_t left = values[step.left];
    if (step.shift >= 0) {
      const bool divides = step.code == Code::FloorDivide;
      value = divides ? left >> step.shift : left & ((int64_t{1} << step.shift) - 1);
      continue;
    }
    const int64_t right = values[step.right];
    bool is_undefined = false;
    switch (step.code) {
      case Code::Add:
        is_undefined = __builtin_add_overflow(left, right, &value);
        break;
      case Code::Subtract:
        is_undefined = __builtin_sub_overflow(left, right, &value);
        break;
      case Code::Multiply:
        is_undefined = __builtin_mul_overflow(left, right, &value);
        break;
      case Code::FloorDivide:
        is_undefined = !floor_divide(left, right, &value);
        break;
      default:
        is_undefined = !floor_modulo(left, right, &value);
    }
    if (is_undefined) return Outcome::Undefined;
  }
  return Outcome::Integers;
}

Truth Condition::look_up(const Instruction& node, const Argument* arguments) const {
  const auto* tensor = tensor_of(node.argument_ref, arguments);
  if (tensor == nullptr) return Truth::Undefined;
  const Lookup& lookup = *lookups_[static_cast<size_t>(node.integer)];
  const Numbers& numbers = numbers_[static_cast<size_t>(node.integer)];
  const Grid* grid = lookup.grid(tensor->device());
  size_t cell = 0;
  if (C10_LIKELY(!numbers.features.empty())) {
    std::array<int64_t, Numbers::kMost> values;  // NOLINT: what is read of them is written first
    const auto outcome = numbers.evaluate(arguments, values.data());
    if (outcome == Numbers::Outcome::Undefined) return Truth::Undefined;
    if (C10_LIKELY(outcome == Numbers::Outcome::Integers)) {
      if (grid == nullptr) return Truth::False;
      const Grid::Axis* axis = grid->axes.data();
      for (const int8_t step : numbers.features) {
        const int64_t index = axis->index_of(values[static_cast<size_t>(step)]);
        if (index < 0) return Truth::False;
        cell = cell * static_cast<size_t>(axis->count) + static_cast<size_t>(index);
        ++axis;
      }
      return to_truth(lookup.takes(*grid, cell));
    }
  }
  bool is_inside = grid != nullptr;
  for (int32_t which = 0; which < node.count; ++which) {
    const Number found = number(child(node, which), arguments);
    if (found.kind == Number::Undefined) return Truth::Undefined;
    if (!is_inside) continue;
    const Grid::Axis& axis = grid->axes[static_cast<size_t>(which)];
    const int64_t index = found.kind == Number::Integer ? axis.index_of(found.integer) : -1;
    is_inside = index >= 0;
    cell = cell * static_cast<size_t>(axis.count) + static_cast<size_t>(index);
  }
  return to_truth(is_inside && lookup.takes(*grid, cell));
}

Truth Condition::compare(const Instruction& node, const Argument* arguments) const {
  const Number left = number(child(node, 0), arguments);
  const Number right = number(child(node, 1), arguments);
  if (left.kind == Number::Undefined || right.kind == Number::Undefined) return Truth::Undefined;
  if (left.kind == Number::Integer && right.kind == Number::Integer) {
    return to_truth(compares_as(node.code, left.integer, right.integer));
  }
  const bool is_complex = left.kind == Number::Complex || right.kind == Number::Complex;
  if (!is_complex) return to_truth(compares_as(node.code, left.exact(), right.exact()));
  const bool same = left.exact() == right.exact() && left.imaginary == right.imaginary;
  if (node.code == Code::Equal) return to_truth(same);
  if (node.code == Code::NotEqual) return to_truth(!same);
  return Truth::Undefined;  // complex numbers have no order
}

Condition::Number Condition::number(const Instruction& node, const Argument* arguments) const {
  switch (node.code) {
    case Code::Integer:
      return Number::of(node.integer);
    case Code::Real:
      return Number::of_real(node.real);
    case Code::Ndim:
    case Code::Numel: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      if (tensor == nullptr) return {};
      return Number::of(node.code == Code::Ndim ? tensor->dim() : tensor->numel());
    }
    case Code::Itemsize: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      return tensor == nullptr ? Number{} : Number::of(static_cast<int64_t>(tensor->itemsize()));
    }
    case Code::Size:
    case Code::Stride: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      if (tensor == nullptr) return {};
      const auto values = node.code == Code::Size ? tensor->sizes() : tensor->strides();
      const Number dim =
          node.count == 0 ? Number::of(node.integer) : number(child(node, 0), arguments);
      if (dim.kind != Number::Integer) return {};
      const int64_t* value = at_dim(values, dim.integer);
      return value == nullptr ? Number{} : Number::of(*value);
    }
    case Code::Capability: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      if (tensor == nullptr || tensor->device_type() != c10::DeviceType::CUDA) return {};
      const auto capability = device_capability(tensor->device().index());
      return capability < 0 ? Number{} : Number::of(capability);
    }
    case Code::Length: {
      const Argument& value = arguments[node.argument_ref.position];
      return value.is_list() ? Number::of(static_cast<int64_t>(value.size())) : Number{};
    }
    case Code::DtypeOf: {
      const auto* tensor = tensor_of(node.argument_ref, arguments);
      if (tensor == nullptr) return {};
      return Number::of(static_cast<int64_t>(c10::typeMetaToScalarType(tensor->dtype())));
    }
    case Code::Item:
    case Code::Value:
      return Number::of(value_of(node.argument_ref, arguments));
    default:
      return arithmetic(node, arguments);
  }
}

// Overflow and division by zero are undefined.
Condition::Number Condition::arithmetic(const Instruction& node, const Argument* arguments) const {
  const Number left = number(child(node, 0), arguments);
  const Number right = number(child(node, 1), arguments);
  if (left.kind != Number::Integer || right.kind != Number::Integer) return {};
  const int64_t a = left.integer, b = right.integer;
  int64_t result = 0;
  switch (node.code) {
    case Code::Add:
      return __builtin_add_overflow(a, b, &result) ? Number{} : Number::of(result);
    case Code::Subtract:
      return __builtin_sub_overflow(a, b, &result) ? Number{} : Number::of(result);
    case Code::Multiply:
      return __builtin_mul_overflow(a, b, &result) ? Number{} : Number::of(result);
    case Code::FloorDivide:
      return floor_divide(a, b, &result) ? Number::of(result) : Number{};
    case Code::Modulo:
      return floor_modulo(a, b, &result) ? Number::of(result) : Number{};
    default:
      TORCH_INTERNAL_ASSERT(false, "not a number: ", static_cast<int>(node.code));
  }
}

}  // namespace opgraft
