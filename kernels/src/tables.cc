#include "tables.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "row_group.h"

namespace engram {

TableState::TableState(Table given) : table(std::move(given)), failed(table.copies.size()) {
  for (const TableCopy& copy : table.copies) {
    seals.emplace_back(copy.pages ? copy.pages->uuid : StoreUuid{},
                       static_cast<std::uint32_t>(table.layer));
  }
}

Tables::Tables(std::vector<Table> tables) {
  for (Table& table : tables) {
    const std::string layer = "layer " + std::to_string(table.layer);
    if (std::ranges::any_of(
            states_, [&](const TableState& other) { return other.table.layer == table.layer; })) {
      throw std::invalid_argument(layer + " is given twice");
    }
    if (table.copies.empty()) throw std::invalid_argument(layer + " has no copy to read");
    if (table.copies.size() > kCopiesMax) {
      throw std::invalid_argument(layer + " has " + std::to_string(table.copies.size()) +
                                  " copies; at most " + std::to_string(kCopiesMax) +
                                  " can be told apart");
    }
    if (table.rows == 0 || table.rows > kTableRowsMax) {
      throw std::invalid_argument(layer + " has " + std::to_string(table.rows) +
                                  " rows; expected 1 to " + std::to_string(kTableRowsMax));
    }
    states_.emplace_back(std::move(table));
  }
}

std::uint16_t Tables::number_of(std::int64_t layer) const {
  std::string known;
  for (std::size_t number = 0; number < states_.size(); ++number) {
    const std::int64_t here = states_[number].table.layer;
    if (here == layer) return static_cast<std::uint16_t>(number);
    known += (known.empty() ? "" : ", ") + std::to_string(here);
  }
  throw std::invalid_argument("layer " + std::to_string(layer) + " has no table here; there are " +
                              known);
}

std::size_t Tables::row_bytes_max() const {
  std::size_t bytes = 0;
  for (const TableState& state : states_) bytes = std::max(bytes, packed_bytes(state.table.kind));
  return bytes;
}

}  // namespace engram
