#include "lookup.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace opgraft {

bool Line::Step::take_constant(int64_t constant) {
  const bool is_power_of_two = constant > 0 && (constant & (constant - 1)) == 0;
  switch (kind) {
    case Kind::Add:
      kind = Kind::AddConstant;
      right = constant;
      return true;
    case Kind::Multiply:
      kind = Kind::MultiplyConstant;
      right = constant;
      return true;
    case Kind::Subtract:
      if (constant == INT64_MIN) return false;
      kind = Kind::AddConstant;
      right = -constant;
      return true;
    case Kind::FloorDivide:
      if (!is_power_of_two) return false;
      kind = Kind::ShiftRight;
      right = __builtin_ctzll(static_cast<uint64_t>(constant));
      return true;
    case Kind::Modulo:
      if (!is_power_of_two) return false;
      kind = Kind::Mask;
      right = constant - 1;
      return true;
    default:
      return false;
  }
}

int8_t Line::add_size(int64_t dim) {
  const auto known = std::find(dims_.begin(), dims_.end(), dim);
  const auto place = static_cast<size_t>(kReads) + static_cast<size_t>(known - dims_.begin());
  if (known != dims_.end()) return static_cast<int8_t>(place);
  if (!steps_.empty() || place >= kMostNumbers) return -1;
  dims_.push_back(dim);
  return static_cast<int8_t>(place);
}

int8_t Line::add(const Step& step) {
  const auto known = std::find(steps_.begin(), steps_.end(), step);
  const auto place =
      static_cast<size_t>(kReads) + dims_.size() + static_cast<size_t>(known - steps_.begin());
  if (place >= kMostNumbers) return -1;
  if (known == steps_.end()) steps_.push_back(step);
  return static_cast<int8_t>(place);
}

Grid::Grid(const std::vector<Axis>& axes, std::string_view cells)
    : cells_(cells.begin(), cells.end()) {
  size_t count = 1;
  for (const Axis& axis : axes) {
    const bool is_known = axis.numbers && static_cast<size_t>(axis.count) != axis.numbers->size();
    TORCH_CHECK(axis.count > 0 && !is_known && axis.shift >= 0 && axis.shift <= kMostShift,
                "a bad axis");
    count *= static_cast<size_t>(axis.count);
    TORCH_CHECK(count <= kMostCells, "a grid has at most ", kMostCells, " cells");
  }
  TORCH_CHECK(cells.size() == count, "a grid has a cell for each combination of buckets");
  for (size_t feature = 0; feature < axes.size(); ++feature) {
    const Axis& axis = axes[feature];
    count /= static_cast<size_t>(axis.count);
    const auto stride = static_cast<uint32_t>(count);
    if (axis.numbers) {
      exact_.push_back(exact(*axis.numbers, stride));
      exact_.back().feature = static_cast<uint8_t>(feature);
    } else {
      stepped_.push_back(stepped(axis, stride));
      stepped_.back().feature = static_cast<uint8_t>(feature);
    }
  }
}

Grid::Stepped Grid::stepped(const Axis& axis, uint32_t stride) {
  Stepped made;
  for (size_t part = 0; part < Stepped::kParts; ++part) {
    int64_t index = static_cast<int64_t>(part >> (kMostShift - axis.shift)) - axis.first;
    if (axis.is_open_ended) index = std::clamp<int64_t>(index, 0, axis.count - 1);
    const bool exists = index >= 0 && index < axis.count;
    made.offsets[part] = exists ? static_cast<uint32_t>(index) * stride : kOutside;
  }
  return made;
}

Grid::Exact Grid::exact(const std::vector<int64_t>& numbers, uint32_t stride) {
  Exact made;
  made.least = *std::min_element(numbers.begin(), numbers.end());
  std::vector<uint32_t> near;
  uint32_t offset = 0;
  for (const int64_t number : numbers) {
    const uint64_t place = static_cast<uint64_t>(number) - static_cast<uint64_t>(made.least);
    if (place < Exact::kMostNear) {
      if (place >= near.size()) near.resize(place + 1, kOutside);
      near[place] = offset;
    } else {
      made.far.emplace_back(number, offset);
    }
    offset += stride;
  }
  made.near_count = near.size();
  made.near = std::make_unique<uint32_t[]>(near.size());
  std::copy(near.begin(), near.end(), made.near.get());
  return made;
}

uint32_t Grid::Exact::far_offset(int64_t number) const {
  for (const auto& [each, offset] : far) {
    if (each == number) return offset;
  }
  return kOutside;
}

uint8_t Grid::cell(const std::optional<int64_t>* features) const {
  size_t index = 0;
  const auto add = [&](const auto& axis) {
    const auto& number = features[axis.feature];
    index += number ? axis.offset(*number) : kOutside;
  };
  for (const auto& axis : stepped_) add(axis);
  for (const auto& axis : exact_) add(axis);
  return index < cells_.size() ? cells_[index] : 0;
}

Lookup::~Lookup() {
  for (auto& each : grids_) delete each.load();
}

C10_NOINLINE const Grid* Lookup::find(c10::Device device, std::atomic<const Grid*>& known) const {
  auto found = source_(device);
  if (found == nullptr) return nullptr;
  const Grid* expected = nullptr;
  // Another thread may have found it meanwhile. Then this one's is dropped.
  if (known.compare_exchange_strong(expected, found.get())) return found.release();
  return expected;
}

}  // namespace opgraft
