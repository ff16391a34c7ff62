// Distinct row ids of a batch, with the index that leads back to every position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace engram {

// Finds the distinct ids of `ids` in order of first appearance; -1 (a zero row) is left out.
//
// distinct  replaced by the distinct ids
// inverse   ids.size() entries: distinct[inverse[i]] == ids[i], and -1 where ids[i] is -1
//
// Expected linear time whatever the ids are: they come from clients, so the hash is seeded per
// process. Throws std::length_error when there are more ids than an int32 can number.
void unique_ids(std::span<const std::int64_t> ids, std::vector<std::int64_t>& distinct,
                std::int32_t* inverse);

}  // namespace engram
