// Conditions, compiled: what `opgraft.when` builds, evaluated on views of a call's arguments
// without the GIL.
//
// Three-valued, as in Python: a part that has no value is undefined, and a condition holds only
// where it is true. `python/opgraft/when/compilation.py` makes the nodes; the two must agree on
// every call, which tests/test_differential.py checks.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "argument.h"

namespace opgraft {

enum class Truth : uint8_t { False, True, Undefined };

// What they read of a call must be in a plan's key (`PlanKey`), or `Condition::is_told_by_key`
// knows.
enum class Code : uint8_t {
  // numbers
  Integer,
  Real,
  Ndim,
  Size,
  Stride,
  Numel,
  Capability,
  Length,
  Item,
  Value,
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
  SameValue,
  OtherValue,
  Dtype,
  Contiguous,
  Aligned,
  RequiresGrad,
  SameDtype,
  SameDevice,
  IsNone,
  All,
  Any,
  Not,
};

// An argument by its position in the schema, or an item of a list argument.
struct Place {
  int32_t argument = 0;
  int32_t item = 0;
  bool is_item = false;
};

// A node of the expression tree, as it is built. What the fields hold depends on the code:
//   Size, Stride              place, integer = dimension
//   Item                      place
//   Aligned                   place, integer = bytes
//   Dtype                     place, integer = bit set of ScalarTypes
//   Contiguous                place, integer = MemoryFormat
//   Integer; Real             integer; real
//   SameValue, OtherValue     place, constant
//   operators, All, Any, Not  children, as indices of nodes
//   SameDtype, SameDevice     places
struct Node {
  Code code{};
  Place place{};
  int64_t integer = 0;
  double real = 0;
  c10::IValue constant{};
  std::vector<int32_t> children{};
  std::vector<Place> places{};
};

// Finds a CUDA device's compute capability as major * 65536 + minor; -1 where it has none. Called
// once per device, at the first condition that needs it: asking earlier would initialise CUDA.
constexpr int64_t kUnknownCapability = -2;  // not now: the next condition asks again
using CapabilityLookup = int64_t (*)(c10::DeviceIndex);
void set_capability_lookup(CapabilityLookup lookup);

// The address of a tensor's first element; 0 for a tensor without elements. Reading it does not
// copy a copy-on-write tensor, and storage that was resized away is no error.
uintptr_t first_address(const c10::TensorImpl& tensor);

// What a plan's key has of that address: the remainder by this many bytes.
constexpr uintptr_t kKeyAlignment = 16;

class Condition {
 public:
  // Holds for every call.
  Condition() = default;
  // `root` is the index of the whole condition. Throws if a child does not come before its parent.
  Condition(std::vector<Node> nodes, int32_t root);

  bool holds(const Argument* arguments) const {
    return passes_first(arguments) && passes_rest(arguments);
  }

  // The same in two parts. The first are the tests that take next to nothing. The rest say nothing
  // that a `PlanKey` does not: they hold for a call if they did for another one with the same key.
  bool passes_first(const Argument* arguments) const { return passes(arguments, 0, first_); }
  bool passes_rest(const Argument* arguments) const {
    return passes(arguments, first_, tests_.size());
  }

 private:
  struct Number;

  // A node as it is evaluated: 40 bytes, so that a chain's conditions stay in the first-level
  // cache. Lists are ranges of the side tables; a constant is an index into `constants_`.
  struct Instruction {
    Code code{};
    Place place{};
    int64_t integer = 0;
    double real = 0;
    int32_t first = 0;
    int32_t count = 0;
  };

  // What must be true for the condition to hold: a part of an `&` at the top. What conditions
  // mostly ask, one comparison of one argument with a constant, is decided without going through
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
    int32_t node = 0;     // the same as a node
    int64_t integer = 0;  // as in `Node`
    int64_t constant = 0;
  };

  Test test_of(int32_t index) const;
  // Whether a plan's key has all that the condition asks about.
  bool is_told_by_key() const;
  [[gnu::hot]] bool passes(const Argument* arguments, size_t from, size_t to) const;
  bool passes(const Test& test, const Argument* arguments) const;
  Truth truth(const Instruction& node, const Argument* arguments) const;
  Number number(const Instruction& node, const Argument* arguments) const;
  Truth compare(const Instruction& node, const Argument* arguments) const;
  Number arithmetic(const Instruction& node, const Argument* arguments) const;
  const Instruction& child(const Instruction& node, int32_t which) const {
    return nodes_[static_cast<size_t>(children_[static_cast<size_t>(node.first + which)])];
  }

  std::vector<Test> tests_;  // all that a call mostly reads
  size_t first_ = 0;         // how many of them are in `passes_first`
  std::vector<Instruction> nodes_;
  std::vector<int32_t> children_;
  std::vector<Place> places_;
  std::vector<c10::IValue> constants_;
};

}  // namespace opgraft
