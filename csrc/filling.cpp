#include "filling.h"

#include <c10/util/Exception.h>

namespace opgraft {

namespace {

// Cells along one axis, from the first one on.
struct CellLine {
  size_t first;
  size_t step;
  size_t count;

  size_t place(size_t index) const { return first + index * step; }
};

uint8_t at(const std::string& cells, size_t place) { return static_cast<uint8_t>(cells[place]); }

// Joins to `found` what the ends of each gap in a line agree on.
void find_between(const std::string& cells, const CellLine& line, std::string& found) {
  size_t low = line.count;  // the last decided cell; none yet
  for (size_t high = 0; high < line.count; ++high) {
    const uint8_t decision = at(cells, line.place(high));
    if (decision == kUndecided) continue;
    if (low != line.count) {
      const uint8_t ends = at(cells, line.place(low)) & decision;
      for (size_t cell = low + 1; cell < high; ++cell) {
        // All bits are set where nothing was found before.
        found[line.place(cell)] = static_cast<char>(at(found, line.place(cell)) & ends);
      }
    }
    low = high;
  }
}

std::string found_between(const std::string& cells, const std::vector<GridAxis>& axes) {
  std::string found(cells.size(), static_cast<char>(kUndecided));
  size_t length = cells.size();
  for (const GridAxis& axis : axes) {
    const size_t step = length / axis.count;
    for (size_t before = 0; axis.has_steps && before < cells.size(); before += length) {
      for (size_t first = before; first < before + step; ++first) {
        find_between(cells, {first, step, axis.count}, found);
      }
    }
    length = step;
  }
  return found;
}

}  // namespace

std::string fill_grid(std::string cells, const std::vector<GridAxis>& axes) {
  const size_t count = cells.size();
  // By division, as a product of absurd counts wraps around.
  size_t length = count;
  for (const GridAxis& axis : axes) {
    TORCH_CHECK_VALUE(axis.count > 0 && length % axis.count == 0, "an axis of ", axis.count,
                      " buckets does not divide the cells that are left: ", length);
    length /= axis.count;
  }
  TORCH_CHECK_VALUE(length == 1, "a grid has ", count, " cells, which are too few or too many");
  for (bool changed = true; changed;) {
    changed = false;
    const std::string found = found_between(cells, axes);
    for (size_t cell = 0; cell < count; ++cell) {
      if (at(cells, cell) != kUndecided || at(found, cell) == kUndecided) continue;
      cells[cell] = found[cell];
      changed = true;
    }
  }
  return cells;
}

}  // namespace opgraft
