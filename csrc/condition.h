// Compiled conditions: expressions of `opgraft.when`, evaluated on views of a call's arguments
// without the GIL.
//
// The logic is three-valued, as in Python: a part that has no value is undefined, and a condition
// holds only if it is true. `python/opgraft/when/compilation.py` creates the nodes. Python and C++
// must agree on every call, which tests/test_differential.py checks.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "argument.h"
#include "lookup.h"

namespace opgraft {

enum class Truth : uint8_t { False, True, Undefined };

// All that these read of a call must be in a plan's key (`PlanKey`). `Condition::is_decided_by_key`
// lists the exceptions.
enum class Code : uint8_t {
  // numbers
  Integer,
  Real,
  Ndim,
  Size,
  Stride,
  Numel,
  Itemsize,
  Capability,
  Length,
  Item,
  Value,
  DtypeOf,
  Add,
  Subtract,
  Multiply,
  FloorDivide,
  Modulo,
  // conditions
  Less,
  LessEqual,
  Equal,
  NotEqual,
  GreaterEqual,
  Greater,
  ValueIs,
  ValueIsNot,
  Dtype,
  Contiguous,
  Aligned,
  RequiresGrad,
  SameDtype,
  SameDevice,
  IsNone,
  Lookup,
  All,
  Any,
  Not,
};

// An argument by its position in the schema, or an item of a list argument.
struct ArgumentRef {
  int32_t position = 0;
  int32_t item = 0;
  bool is_item = false;
};

// A node of the expression tree, as it is built. What the fields hold depends on the code:
//   Size, Stride              argument_ref, integer = dimension, or a child that computes it
//   Item                      argument_ref
//   Aligned                   argument_ref, integer = bytes
//   Dtype                     argument_ref, integer = bit set of ScalarTypes
//   Contiguous                argument_ref, integer = MemoryFormat
//   Integer; Real             integer; real
//   ValueIs, ValueIsNot       argument_ref, constant
//   operators, All, Any, Not  children, as indices of nodes
//   Lookup                    argument_ref = a tensor on the device, children = features, lookup
//   SameDtype, SameDevice     argument_refs
struct Node {
  Code code{};
  ArgumentRef argument_ref{};
  int64_t integer = 0;
  double real = 0;
  c10::IValue constant{};
  std::vector<int32_t> children{};
  std::vector<ArgumentRef> argument_refs{};
  std::shared_ptr<const Lookup> lookup{};
};

// Looks up a CUDA device's compute capability as major * 65536 + minor; -1 if it has none. It is
// called once per device, by the first condition that needs it, because an earlier call would
// initialise CUDA.
constexpr int64_t kUnknownCapability = -2;  // not known now: the next condition looks it up again
using CapabilityLookup = int64_t (*)(c10::DeviceIndex);
void set_capability_lookup(CapabilityLookup lookup);

// The address of a tensor's first element; 0 for an empty tensor. It does not materialize a
// copy-on-write tensor, and a storage that was resized to nothing is no error.
uintptr_t first_address(const c10::TensorImpl& tensor);

// A plan's key contains that address modulo this many bytes.
constexpr uintptr_t kKeyAlignment = 16;

// What most conditions ask of their main tensor, in one test: a dtype, a rank, a number of
// elements, the size of one dimension, contiguity. Its parts are combined without a branch, because
// in a program that does other things between two calls each branch may be predicted wrongly.
struct TensorTest {
  // Inclusive; empty if `least` is above `most`.
  struct Range {
    int64_t least = INT64_MIN;
    int64_t most = INT64_MAX;
    uint64_t contains(int64_t value) const {
      return static_cast<uint64_t>(value >= least) & static_cast<uint64_t>(value <= most);
    }
  };
  static constexpr int64_t kRanks = 63;  // greater ranks share a bit with this one

  int16_t argument = -1;  // by its position; -1: there is no test, and every call passes
  bool contiguous = false;
  bool has_size = false;
  int32_t dim = 0;          // of `size`, if `has_size`
  uint64_t dtypes = ~0ULL;  // a bit for each ScalarType
  uint64_t ranks = ~0ULL;
  Range numel{};
  Range size{};

  bool exists() const { return argument >= 0; }

  // `tensor`: the argument. Its sizes are not symbolic.
  C10_ALWAYS_INLINE bool passes(const c10::TensorImpl& tensor) const {
    return passes_but_for_strides(tensor) && (!contiguous || tensor.is_contiguous());
  }
  C10_ALWAYS_INLINE bool passes_but_for_strides(const c10::TensorImpl& tensor) const {
    static_assert(c10::NumScalarTypes <= 64);
    // Sizes turn away most of the calls that are turned away.
    const int64_t rank = tensor.dim();
    uint64_t passed = numel.contains(tensor.numel());
    if (has_size) {
      const int64_t index = dim + (dim < 0 ? rank : 0);
      if (C10_UNLIKELY(index < 0 || index >= rank)) return false;
      passed &= size.contains(tensor.sizes()[static_cast<size_t>(index)]);
    }
    if (passed == 0) return false;
    passed = dtypes >> static_cast<unsigned>(c10::typeMetaToScalarType(tensor.dtype()));
    passed &= ranks >> std::min(rank, kRanks);
    return (passed & 1) != 0;
  }
  bool passes(const Argument* arguments) const {
    if (C10_UNLIKELY(!exists())) return true;
    const auto* tensor = arguments[argument].tensor();
    return C10_LIKELY(tensor != nullptr) && passes(*tensor);
  }

  // Widens it, so that a tensor passes if it passes `other` or has passed this. If they ask of
  // different arguments, there is no test.
  void widen(const TensorTest& other);
};

class Condition {
 public:
  // A condition that holds for every call.
  Condition() = default;
  // `root` is the index of the whole condition. Throws if a child does not come before its parent.
  Condition(std::vector<Node> nodes, int32_t root);

  bool holds(const Argument* arguments) const {
    return tensor_test_.passes(arguments) && passes_more_quick_tests(arguments) &&
           passes_other_tests(arguments);
  }

  // `holds` in three parts. The first two, the quick tests, take almost no time. The other tests
  // depend only on what is in a `PlanKey`: they pass for a call if they passed for another one with
  // the same key.
  const TensorTest& tensor_test() const { return tensor_test_; }
  bool passes_more_quick_tests(const Argument* arguments) const {
    return passes(arguments, 0, quick_count_);
  }
  bool passes_other_tests(const Argument* arguments) const {
    return passes(arguments, quick_count_, tests_.size()) &&
           (number_tests_.empty() || passes_number_tests(arguments));
  }

 private:
  struct Number;

  // A node in the form that is evaluated. It has 40 bytes, so that a chain's conditions stay in the
  // first-level cache. Lists are ranges in the member vectors below, and a constant or a lookup
  // is an index into one of them.
  struct Instruction {
    Code code{};
    ArgumentRef argument_ref{};
    int64_t integer = 0;
    double real = 0;
    int32_t first = 0;
    int32_t count = 0;
  };

  // A part that must be true for the condition to hold: an operand of the `&` at the top. The most
  // common part, a comparison of one argument's property with a constant, is evaluated without
  // nodes.
  struct Test {
    enum class Kind : uint8_t {
      Node,
      Value,
      Dtype,
      Contiguous,
      Ndim,
      Numel,
      Size
    } kind = Kind::Node;
    uint8_t relation = 0;  // bits: the value may be less than, equal to, greater than `constant`
    uint16_t argument = 0;
    int32_t node = 0;     // the test as a node
    int64_t integer = 0;  // as in `Instruction`
    int64_t constant = 0;

    bool compares(int64_t value) const {
      const int compared = (value > constant) + (value >= constant);
      return (relation >> compared & 1) != 0;
    }
  };

  // A test of numbers on `line_`: a comparison with a constant, or a lookup.
  struct NumberTest {
    Test test{};
    size_t step_count = 0;           // the steps that it needs, from the first one on
    std::vector<uint8_t> places{};   // of its numbers
    const Lookup* lookup = nullptr;  // null for a comparison

    bool passes(const Argument* arguments, const Line::Numbers& numbers) const;
  };

  Test test_of(int32_t index) const;
  // Moves tests of numbers to `number_tests_`.
  void make_number_tests();
  // The nodes of a test's numbers; none if it is no test of numbers.
  std::vector<const Instruction*> numbers_of(const Test& test) const;
  // The first tensor of which a number is; null if there is none.
  const ArgumentRef* tensor_of_number(const Instruction& node) const;
  // Adds the sizes of the main tensor that a node needs.
  void add_sizes(const Instruction& node);
  // The place of a node's number, whose step is added with those that it needs; -1 if it has none.
  int8_t add_number(const Instruction& node);
  int8_t add_arithmetic(const Instruction& node);
  // Moves tests of one tensor into `tensor_test_`, as many as it can hold.
  void make_tensor_test();
  // Whether a plan's key contains all that the condition depends on.
  bool is_decided_by_key() const;
  [[gnu::hot]] bool passes(const Argument* arguments, size_t from, size_t to) const;
  bool passes(const Test& test, const Argument* arguments) const;
  [[gnu::hot]] bool passes_number_tests(const Argument* arguments) const;
  Truth truth(const Instruction& node, const Argument* arguments) const;
  Number number(const Instruction& node, const Argument* arguments) const;
  Truth compare(const Instruction& node, const Argument* arguments) const;
  Truth look_up(const Instruction& node, const Argument* arguments) const;
  Number arithmetic(const Instruction& node, const Argument* arguments) const;
  const Instruction& child(const Instruction& node, int32_t which) const {
    return nodes_[static_cast<size_t>(children_[static_cast<size_t>(node.first + which)])];
  }

  TensorTest tensor_test_;
  std::vector<Test> tests_;  // those that `tensor_test_` does not hold
  size_t quick_count_ = 0;   // the number of quick tests, which come first
  std::vector<NumberTest> number_tests_;
  Line line_;
  std::vector<Instruction> nodes_;
  std::vector<int32_t> children_;
  std::vector<ArgumentRef> argument_refs_;
  std::vector<c10::IValue> constants_;
  std::vector<std::shared_ptr<const Lookup>> lookups_;
};

}  // namespace opgraft
