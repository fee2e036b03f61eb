// Numbers of a call, and lookups: what measured tables decide for the cell that they fall into.
//
// Every miss may compute and look up some. So this neither branches on their values nor searches
// for them.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Macros.h>
#include <c10/util/bit_cast.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "argument.h"

namespace opgraft {

// Numbers of a call as a straight line of steps, each of which computes one from the arguments or
// from numbers before it. What several expressions have in common is computed once, and nothing
// divides by a power of two.
class Line {
 public:
  // The numbers: first those that are read of every call's main tensor, then its sizes that
  // expressions name, and then one for each step.
  enum Read : int8_t { kNumel, kNdim, kDtype, kItemsize, kReads };
  static constexpr size_t kMostNumbers = 32;
  using Numbers = std::array<int64_t, kMostNumbers>;

  struct Step {
    enum class Kind : uint8_t {
      // of a tensor
      Numel,
      Ndim,
      Dtype,
      Itemsize,
      Size,  // `right` is the dimension
      Stride,
      SizeAt,  // the number at `left` is the dimension
      StrideAt,
      // of another argument
      Value,
      // of numbers before it, by their places, or of one and a constant
      Constant,
      Add,
      AddConstant,
      Subtract,
      Multiply,
      MultiplyConstant,
      FloorDivide,
      Modulo,
      ShiftRight,
      Mask,
    };
    Kind kind{};
    int8_t left = -1;
    uint16_t argument = 0;
    int64_t right = 0;  // a place, a constant or a dimension

    // Makes a constant the right side; false if there is no kind of step for it.
    bool take_constant(int64_t constant);
    bool operator==(const Step&) const = default;
  };

  // Whether all numbers have a value, which is an integer.
  enum class Outcome : uint8_t { Integers, Undefined, Others };

  Line() = default;
  explicit Line(uint16_t main) : main_(main) {}

  // The place of a size of the main tensor, which is added if it is not there. All sizes come
  // before the first step.
  int8_t add_size(int64_t dim);
  // The place of a step's number, whose step is added if no other one is the same. Both return -1
  // if there is no room.
  int8_t add(const Step& step);
  uint16_t main() const { return main_; }
  size_t step_count() const { return steps_.size(); }

  // Reads the main tensor. Its sizes are not symbolic.
  C10_ALWAYS_INLINE Outcome read(const c10::TensorImpl& main, Numbers& numbers) const;
  // Runs some of the steps, after those before them.
  C10_ALWAYS_INLINE Outcome run(size_t from, size_t to, const Argument* arguments,
                                Numbers& numbers) const;

 private:
  uint16_t main_ = 0;
  std::vector<int64_t> dims_{};  // of the main tensor's sizes
  std::vector<Step> steps_{};
};

// What a measured table decides for the calls on one device: a cell for each combination of the
// buckets that features fall into. `python/opgraft/when/grid.py` makes them, and looks up the same
// cells. Immutable.
class Grid {
 public:
  // As Python describes it.
  struct Axis {
    // If exact: each number that has a bucket.
    std::optional<std::vector<int64_t>> numbers{};
    // If not: buckets divide each octave into `1 << shift` parts, and `first` is the lowest one.
    int shift = 0;
    int64_t first = 0;
    int64_t count = 0;
    bool is_open_ended = false;  // what is beyond the outermost buckets belongs to them
  };
  static constexpr int kMostShift = 3;
  static constexpr size_t kMostCells = size_t{1} << 16;

  // Without cells, every call is outside.
  Grid() = default;
  // `cells`: the last axis varies fastest; a bit for each column.
  Grid(const std::vector<Axis>& axes, std::string_view cells);

  // The cell of a call, whose features are the numbers at some places; 0 if it is outside.
  C10_ALWAYS_INLINE uint8_t cell(const int64_t* numbers, const uint8_t* places) const;
  // The same, where only some features may be integers.
  uint8_t cell(const std::optional<int64_t>* features) const;

 private:
  // What the bucket of a number on an axis adds to the index of the cell. The sum is no cell's if
  // one of them is this, as there is no bucket.
  static constexpr uint32_t kOutside = kMostCells;

  // Of each part of an octave, divided as finely as an axis can be, from 1 to the greatest number.
  struct Stepped {
    static constexpr size_t kParts = size_t{63} << kMostShift;
    std::array<uint32_t, kParts> offsets{};
    uint8_t feature = 0;

    C10_ALWAYS_INLINE uint32_t offset(int64_t number) const;
  };
  struct Exact {
    static constexpr uint64_t kMostNear = 1024;
    int64_t least = 0;
    uint64_t near_count = 0;
    std::unique_ptr<uint32_t[]> near{};               // of the numbers from `least` on
    std::vector<std::pair<int64_t, uint32_t>> far{};  // of numbers beyond, which are rare
    uint8_t feature = 0;

    C10_ALWAYS_INLINE uint32_t offset(int64_t number) const;
    uint32_t far_offset(int64_t number) const;
  };

  static Stepped stepped(const Axis& axis, uint32_t stride);
  static Exact exact(const std::vector<int64_t>& numbers, uint32_t stride);

  std::vector<Stepped> stepped_;
  std::vector<Exact> exact_;
  std::vector<uint8_t> cells_;
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

  // The grid for a device; null if it is not known now.
  const Grid* grid(c10::Device device) const {
    const auto slot = static_cast<uint8_t>(device.index() + 1);
    if (C10_UNLIKELY(slot >= kGrids)) return nullptr;
    const Grid* known = grids_[slot].load(std::memory_order_acquire);
    return C10_LIKELY(known != nullptr) ? known : find(device, grids_[slot]);
  }
  bool takes(uint8_t cell) const { return (cell >> column_ & 1) != 0; }

 private:
  static constexpr size_t kGrids = 65;

  const Grid* find(c10::Device device, std::atomic<const Grid*>& known) const;

  Source source_;
  int column_;
  mutable std::array<std::atomic<const Grid*>, kGrids> grids_{};  // by device index + 1
};

// --------------------------------------------------------------------------- as every miss runs it

namespace arithmetic {

// As in Python. False where there is no result.
inline bool floor_divide(int64_t a, int64_t b, int64_t* result) {
  if (b == 0) return false;
  if (C10_LIKELY(static_cast<uint64_t>(a | b) <= UINT32_MAX)) {  // what a processor divides faster
    *result = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return true;
  }
  if (b == -1 && a == INT64_MIN) return false;
  *result = a / b - static_cast<int64_t>(a % b != 0 && (a % b < 0) != (b < 0));
  return true;
}

inline bool floor_modulo(int64_t a, int64_t b, int64_t* result) {
  if (b == 0) return false;
  const int64_t rest = b == -1 ? 0 : a % b;
  *result = rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  return true;
}

}  // namespace arithmetic

// Reads the size or stride of a dimension, counted from the end if negative. False if there is
// none.
C10_ALWAYS_INLINE bool read_dim(c10::IntArrayRef values, int64_t dim, int64_t* value) {
  const auto dims = static_cast<int64_t>(values.size());
  dim += dim < 0 ? dims : 0;
  if (C10_UNLIKELY(static_cast<uint64_t>(dim) >= static_cast<uint64_t>(dims))) return false;
  *value = values.data()[dim];
  return true;
}

inline Line::Outcome Line::read(const c10::TensorImpl& main, Numbers& numbers) const {
  numbers[kNumel] = main.numel();
  numbers[kNdim] = main.dim();
  numbers[kDtype] = static_cast<int64_t>(c10::typeMetaToScalarType(main.dtype()));
  numbers[kItemsize] = static_cast<int64_t>(main.itemsize());
  if (C10_UNLIKELY(dims_.empty())) return Outcome::Integers;
  const auto sizes = main.sizes();
  int64_t* next = numbers.data() + kReads;
  for (const int64_t dim : dims_) {
    if (!read_dim(sizes, dim, next++)) return Outcome::Undefined;
  }
  return Outcome::Integers;
}

inline Line::Outcome Line::run(size_t from, size_t to, const Argument* arguments,
                               Numbers& numbers) const {
  using Kind = Step::Kind;
  int64_t* next = numbers.data() + kReads + dims_.size() + from;
  for (size_t which = from; which < to; ++which) {
    const Step& step = steps_[which];
    int64_t& value = *next++;
    const auto left = [&] {
      return numbers[static_cast<size_t>(step.left)];
    };
    const auto right = [&] {
      return numbers[static_cast<size_t>(step.right)];
    };
    switch (step.kind) {
      case Kind::Size:
      case Kind::SizeAt:
      case Kind::Stride:
      case Kind::StrideAt: {
        const auto* tensor = arguments[step.argument].tensor();
        if (C10_UNLIKELY(tensor == nullptr)) return Outcome::Undefined;
        const bool is_size = step.kind == Kind::Size || step.kind == Kind::SizeAt;
        const bool is_named = step.kind == Kind::SizeAt || step.kind == Kind::StrideAt;
        const auto values = is_size ? tensor->sizes() : tensor->strides();
        if (!read_dim(values, is_named ? left() : step.right, &value)) return Outcome::Undefined;
        continue;
      }
      case Kind::Numel:
      case Kind::Ndim:
      case Kind::Dtype:
      case Kind::Itemsize: {
        const auto* tensor = arguments[step.argument].tensor();
        if (C10_UNLIKELY(tensor == nullptr)) return Outcome::Undefined;
        if (step.kind == Kind::Numel) value = tensor->numel();
        if (step.kind == Kind::Ndim) value = tensor->dim();
        if (step.kind == Kind::Dtype)
          value = static_cast<int64_t>(c10::typeMetaToScalarType(tensor->dtype()));
        if (step.kind == Kind::Itemsize) value = static_cast<int64_t>(tensor->itemsize());
        continue;
      }
      case Kind::Value: {
        const Argument& given = arguments[step.argument];
        if (C10_UNLIKELY(given.is_none())) return Outcome::Undefined;
        if (given.kind() != Argument::Kind::Integer && given.kind() != Argument::Kind::Bool) {
          return Outcome::Others;
        }
        value = given.integer();
        continue;
      }
      case Kind::Constant:
        value = step.right;
        continue;
      case Kind::ShiftRight:
        value = left() >> step.right;
        continue;
      case Kind::Mask:
        value = left() & step.right;
        continue;
      case Kind::Add:
        if (__builtin_add_overflow(left(), right(), &value)) return Outcome::Undefined;
        continue;
      case Kind::AddConstant:
        if (__builtin_add_overflow(left(), step.right, &value)) return Outcome::Undefined;
        continue;
      case Kind::Subtract:
        if (__builtin_sub_overflow(left(), right(), &value)) return Outcome::Undefined;
        continue;
      case Kind::Multiply:
        if (__builtin_mul_overflow(left(), right(), &value)) return Outcome::Undefined;
        continue;
      case Kind::MultiplyConstant:
        if (__builtin_mul_overflow(left(), step.right, &value)) return Outcome::Undefined;
        continue;
      case Kind::FloorDivide:
        if (!arithmetic::floor_divide(left(), right(), &value)) return Outcome::Undefined;
        continue;
      case Kind::Modulo:
        if (!arithmetic::floor_modulo(left(), right(), &value)) return Outcome::Undefined;
        continue;
    }
    __builtin_unreachable();
  }
  return Outcome::Integers;
}

inline uint32_t Grid::Stepped::offset(int64_t number) const {
  // A double begins with its exponent, which is the octave, and the first digits of its fraction,
  // which are the part of it. Greater numbers are rounded.
  const auto part = [](int64_t exact) {
    const auto bits = c10::bit_cast<uint64_t>(static_cast<double>(exact));
    return (bits >> (52 - kMostShift)) - (1023U << kMostShift);
  };
  if (C10_LIKELY(static_cast<uint64_t>(number - 1) >> 53 == 0)) return offsets[part(number)];
  if (number < 1) return kOutside;
  return offsets[part(number >> 10) + (10U << kMostShift)];
}

inline uint32_t Grid::Exact::offset(int64_t number) const {
  const uint64_t place = static_cast<uint64_t>(number) - static_cast<uint64_t>(least);
  return C10_LIKELY(place < near_count) ? near[place] : far_offset(number);
}

inline uint8_t Grid::cell(const int64_t* numbers, const uint8_t* places) const {
  size_t index = 0;
  for (const auto& axis : stepped_) index += axis.offset(numbers[places[axis.feature]]);
  for (const auto& axis : exact_) index += axis.offset(numbers[places[axis.feature]]);
  return C10_LIKELY(index < cells_.size()) ? cells_[index] : 0;
}

}  // namespace opgraft
