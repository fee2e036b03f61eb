// What a table decides for the cells of its grid that were not measured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace opgraft {

// An axis of a grid: how many buckets it has, and whether they have an order.
struct GridAxis {
  size_t count;
  bool has_steps;
};

// In place of a decision, of which there are fewer bits.
inline constexpr uint8_t kUndecided = 0xFF;

// Fills in undecided cells between two decided ones, as `rule.grid_of` in Python says: with what
// all decided neighbours along the axes with steps agree on. A cell is a byte, and those along the
// last axis lie next to each other.
std::string fill_grid(std::string cells, const std::vector<GridAxis>& axes);

}  // namespace opgraft
