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

}  // namespace

uintptr_t first_address(const c10::TensorImpl& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto base = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return base + static_cast<uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
}

void set_capability_lookup(CapabilityLookup lookup) { capability_lookup.store(lookup); }

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
  quick_count_ = static_cast<size_t>(rest - tests_.begin());
  if (is_decided_by_key()) {
    make_number_tests();
  } else {
    quick_count_ = tests_.size();
  }
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
  const Argument& argument = arguments[test.argument];
  if (C10_UNLIKELY(test.kind <= Test::Kind::Value)) {
    if (test.kind == Test::Kind::Value && argument.kind() == Argument::Kind::Integer) {
      return test.compares(argument.integer());
    }
    return truth(nodes_[static_cast<size_t>(test.node)], arguments) == Truth::True;
  }
  const c10::TensorImpl* tensor = argument.tensor();
  if (C10_UNLIKELY(tensor == nullptr)) return false;
  switch (test.kind) {
    case Test::Kind::Dtype:
      return has_dtype(*tensor, test.integer);
    case Test::Kind::Contiguous:
      return is_contiguous(*tensor, test.integer);
    case Test::Kind::Ndim:
      return test.compares(tensor->dim());
    case Test::Kind::Numel:
      return test.compares(tensor->numel());
    default: {
      int64_t size = 0;
      return read_dim(tensor->sizes(), test.integer, &size) && test.compares(size);
    }
  }
}

inline bool Condition::NumberTest::passes(const Argument* arguments,
                                          const Line::Numbers& numbers) const {
  if (lookup == nullptr) return test.compares(numbers[places[0]]);
  const auto* tensor = arguments[test.argument].tensor();
  if (C10_UNLIKELY(tensor == nullptr)) return false;
  const Grid* grid = lookup->grid(tensor->device());
  return grid != nullptr && lookup->takes(grid->cell(numbers.data(), places.data()));
}

// A number that is undefined fails its test.
bool Condition::passes_number_tests(const Argument* arguments) const {
  using Outcome = Line::Outcome;
  const auto* tensor = arguments[line_.main()].tensor();
  if (C10_UNLIKELY(tensor == nullptr)) return false;
  Line::Numbers numbers;  // NOLINT: what is read of them is written first
  auto outcome = line_.read(*tensor, numbers);
  size_t done = 0;
  for (const NumberTest& each : number_tests_) {
    if (C10_LIKELY(outcome == Outcome::Integers)) {
      outcome = line_.run(done, each.step_count, arguments, numbers);
      done = each.step_count;
    }
    if (C10_UNLIKELY(outcome == Outcome::Undefined)) return false;
    if (C10_UNLIKELY(outcome == Outcome::Others)) {
      const Instruction& node = nodes_[static_cast<size_t>(each.test.node)];
      if (truth(node, arguments) != Truth::True) return false;
    } else if (!each.passes(arguments, numbers)) {
      return false;
    }
  }
  return true;
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

// --------------------------------------------------------------------------- tests of numbers

void Condition::make_number_tests() {
  const auto first = tests_.begin() + static_cast<std::ptrdiff_t>(quick_count_);
  // Lookups, which take longest, come last.
  std::stable_partition(first, tests_.end(), [&](const Test& test) {
    return nodes_[static_cast<size_t>(test.node)].code != Code::Lookup;
  });
  std::vector<const Instruction*> all;
  for (auto test = first; test != tests_.end(); ++test) {
    const auto numbers = numbers_of(*test);
    all.insert(all.end(), numbers.begin(), numbers.end());
  }
  const ArgumentRef* main = nullptr;
  for (const auto* number : all) {
    if (main == nullptr) main = tensor_of_number(*number);
  }
  if (main == nullptr) return;
  // If that is no tensor, one of the tests fails, and so does the condition.
  line_ = Line(static_cast<uint16_t>(main->position));
  for (const auto* number : all) add_sizes(*number);
  const auto move = [&](const Test& test) {
    const auto numbers = numbers_of(test);
    NumberTest made{test};
    for (const auto* node : numbers) {
      const int8_t place = add_number(*node);
      if (place < 0) return false;
      made.places.push_back(static_cast<uint8_t>(place));
    }
    if (numbers.empty()) return false;
    const Instruction& node = nodes_[static_cast<size_t>(test.node)];
    if (node.code == Code::Lookup) made.lookup = lookups_[static_cast<size_t>(node.integer)].get();
    made.step_count = line_.step_count();
    number_tests_.push_back(std::move(made));
    return true;
  };
  tests_.erase(std::remove_if(first, tests_.end(), move), tests_.end());
}

std::vector<const Condition::Instruction*> Condition::numbers_of(const Test& test) const {
  const Instruction& node = nodes_[static_cast<size_t>(test.node)];
  std::vector<const Instruction*> found;
  if (node.code == Code::Lookup) {
    for (int32_t which = 0; which < node.count; ++which) found.push_back(&child(node, which));
    return node.argument_ref.is_item ? std::vector<const Instruction*>() : found;
  }
  const bool compares = node.code >= Code::Less && node.code <= Code::Greater;
  if (compares && child(node, 1).code == Code::Integer) found.push_back(&child(node, 0));
  return found;
}

const ArgumentRef* Condition::tensor_of_number(const Instruction& node) const {
  switch (node.code) {
    case Code::Numel:
    case Code::Ndim:
    case Code::DtypeOf:
    case Code::Itemsize:
    case Code::Size:
    case Code::Stride:
      return node.argument_ref.is_item ? nullptr : &node.argument_ref;
    default:
      break;
  }
  for (int32_t which = 0; which < node.count; ++which) {
    if (const auto* found = tensor_of_number(child(node, which))) return found;
  }
  return nullptr;
}

void Condition::add_sizes(const Instruction& node) {
  const auto& ref = node.argument_ref;
  if (node.code == Code::Size && node.count == 0 && !ref.is_item && ref.position == line_.main())
    line_.add_size(node.integer);
  for (int32_t which = 0; which < node.count; ++which) add_sizes(child(node, which));
}

int8_t Condition::add_number(const Instruction& node) {
  using Kind = Line::Step::Kind;
  Line::Step step;
  step.argument = static_cast<uint16_t>(node.argument_ref.position);
  const auto of_tensor = [&](Kind kind, Line::Read read) {
    step.kind = kind;
    return step.argument == line_.main() ? int8_t{read} : line_.add(step);
  };
  if (node.argument_ref.is_item) return -1;
  switch (node.code) {
    case Code::Numel:
      return of_tensor(Kind::Numel, Line::kNumel);
    case Code::Ndim:
      return of_tensor(Kind::Ndim, Line::kNdim);
    case Code::DtypeOf:
      return of_tensor(Kind::Dtype, Line::kDtype);
    case Code::Itemsize:
      return of_tensor(Kind::Itemsize, Line::kItemsize);
    case Code::Size:
    case Code::Stride: {
      const bool is_size = node.code == Code::Size;
      step.kind = is_size ? Kind::Size : Kind::Stride;
      step.right = node.integer;
      if (node.count == 0) {
        const bool is_read = is_size && step.argument == line_.main();
        return is_read ? line_.add_size(node.integer) : line_.add(step);
      }
      step.kind = is_size ? Kind::SizeAt : Kind::StrideAt;
      step.right = 0;
      step.left = add_number(child(node, 0));
      return step.left < 0 ? int8_t{-1} : line_.add(step);
    }
    case Code::Value:
      step.kind = Kind::Value;
      return line_.add(step);
    case Code::Integer:
      step.kind = Kind::Constant;
      step.right = node.integer;
      return line_.add(step);
    default:
      return add_arithmetic(node);
  }
}

int8_t Condition::add_arithmetic(const Instruction& node) {
  using Kind = Line::Step::Kind;
  const auto kind = [&]() -> std::optional<Kind> {
    switch (node.code) {
      case Code::Add:
        return Kind::Add;
      case Code::Subtract:
        return Kind::Subtract;
      case Code::Multiply:
        return Kind::Multiply;
      case Code::FloorDivide:
        return Kind::FloorDivide;
      case Code::Modulo:
        return Kind::Modulo;
      default:
        return std::nullopt;
    }
  }();
  if (!kind) return -1;
  Line::Step step;
  step.kind = *kind;
  step.left = add_number(child(node, 0));
  if (step.left < 0) return -1;
  const Instruction& right = child(node, 1);
  if (right.code == Code::Integer && step.take_constant(right.integer)) return line_.add(step);
  step.right = add_number(right);
  return step.right < 0 ? int8_t{-1} : line_.add(step);
}

Truth Condition::look_up(const Instruction& node, const Argument* arguments) const {
  const auto* tensor = tensor_of(node.argument_ref, arguments);
  if (tensor == nullptr) return Truth::Undefined;
  const Lookup& lookup = *lookups_[static_cast<size_t>(node.integer)];
  const Grid* grid = lookup.grid(tensor->device());
  c10::SmallVector<std::optional<int64_t>, 8> features;
  for (int32_t which = 0; which < node.count; ++which) {
    const Number found = number(child(node, which), arguments);
    if (found.kind == Number::Undefined) return Truth::Undefined;
    features.push_back(found.kind == Number::Integer ? std::optional(found.integer) : std::nullopt);
  }
  return to_truth(grid != nullptr && lookup.takes(grid->cell(features.data())));
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
      int64_t value = 0;
      return read_dim(values, dim.integer, &value) ? Number::of(value) : Number{};
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
      return arithmetic::floor_divide(a, b, &result) ? Number::of(result) : Number{};
    case Code::Modulo:
      return arithmetic::floor_modulo(a, b, &result) ? Number::of(result) : Number{};
    default:
      TORCH_INTERNAL_ASSERT(false, "not a number: ", static_cast<int>(node.code));
  }
}

}  // namespace opgraft
