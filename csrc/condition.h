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
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "argument.h"

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

// What a measured table decides for the calls on one device: a cell for each combination of the
// buckets that numbers of a call fall into. `python/opgraft/when/grid.py` makes them, and looks up
// the same cells. Immutable.
struct Grid {
  struct Axis {
    // The index of a number's bucket; -1 if the number is outside.
    int64_t index_of(int64_t number) const;

    bool is_exact = false;
    // If exact: each number that has a bucket, in no order.
    std::vector<int64_t> numbers{};
    // If not: buckets divide each octave into `1 << shift` parts, and `first` is the lowest one.
    int shift = 0;
    int64_t first = 0;
    int64_t count = 0;
    bool is_open_ended = false;  // what is beyond the outermost buckets belongs to them
  };
  std::vector<Axis> axes{};
  std::vector<uint8_t> cells{};  // the last axis varies fastest; a bit for each column
};

// The grids of a lookup, each of which is asked for when the first call on its device arrives: an
// earlier look at the devices would initialise CUDA.
class Lookup {
 public:
  // Returns null if the grid is not known now: the next condition asks again.
  using Source = std::function<std::unique_ptr<const Grid>(c10::Device)>;

  Lookup(Source source, int column) : source_(std::move(source)), column_(column) {}
  ~Lookup();
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

  // The grid for a device; null if it has none.
  const Grid* grid(c10::Device device) const;
  bool takes(const Grid& grid, size_t cell) const { return (grid.cells[cell] >> column_ & 1) != 0; }

 private:
  static constexpr size_t kGrids = 65;

  const Grid* find(c10::Device device, std::atomic<const Grid*>& known) const;

  Source source_;
  int column_;
  mutable std::array<std::atomic<const Grid*>, kGrids> grids_{};  // by device index + 1
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
    static_assert(c10::NumScalarTypes <= 64);
    const int64_t rank = tensor.dim();
    uint64_t passed = dtypes >> static_cast<unsigned>(c10::typeMetaToScalarType(tensor.dtype()));
    passed &= ranks >> std::min(rank, kRanks);
    passed &= numel.contains(tensor.numel());
    if (has_size) {
      const int64_t index = dim + (dim < 0 ? rank : 0);
      if (C10_UNLIKELY(index < 0 || index >= rank)) return false;
      passed &= size.contains(tensor.sizes()[static_cast<size_t>(index)]);
    }
    if (contiguous) passed &= static_cast<uint64_t>(tensor.is_contiguous());
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
    return passes(arguments, quick_count_, tests_.size());
  }

 private:
  struct Number;

  // A node in the form that is evaluated. It has 40 bytes, so that a chain's conditions stay in the
  // first-level cache. Lists are ranges in the member vectors below, and a constant is an index
  // into `constants_`.
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
    int32_t node = 0;     // the test as a node, for Kind::Node
    int64_t integer = 0;  // as in `Node`
    int64_t constant = 0;
  };

  // The features of a lookup as a straight line of steps, each of which computes one number from
  // the arguments or from steps before it. What features have in common is computed once, and
  // nothing divides by a power of two.
  struct Numbers {
    static constexpr size_t kMost = 32;  // steps

    struct Step {
      Code code{};
      int8_t shift = -1;  // of FloorDivide and Modulo: the right side is `1 << shift`
      int8_t left = -1;   // the step of the left side, or of a dimension that an argument names
      int8_t right = -1;
      uint16_t argument = 0;
      int64_t integer = 0;  // as in `Node`

      bool operator==(const Step& other) const;
    };
    // Whether all have a value, which is an integer.
    enum class Outcome : uint8_t { Integers, Undefined, Others };

    Outcome evaluate(const Argument* arguments, int64_t* values) const;

    std::vector<Step> steps{};
    std::vector<int8_t> features{};  // the step of each; none if the nodes are to be evaluated
  };

  Test test_of(int32_t index) const;
  Numbers numbers_of(const Instruction& lookup) const;
  // The step of a node's number, which is added with those that it needs; -1 if it is none.
  int8_t add_step(Numbers& numbers, const Instruction& node) const;
  // Moves tests of one tensor into `tensor_test_`, as many as it can hold.
  void make_tensor_test();
  // Whether a plan's key contains all that the condition depends on.
  bool is_decided_by_key() const;
  [[gnu::hot]] bool passes(const Argument* arguments, size_t from, size_t to) const;
  bool passes(const Test& test, const Argument* arguments) const;
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
  std::vector<Instruction> nodes_;
  std::vector<int32_t> children_;
  std::vector<ArgumentRef> argument_refs_;
  std::vector<c10::IValue> constants_;
  std::vector<std::shared_ptr<const Lookup>> lookups_;
  std::vector<Numbers> numbers_;  // of each lookup
};

}  // namespace opgraft
