// How many rows of a call somebody reads the results of.

#pragma once

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace plora {

// Of `count` rows the first ones, as the scalar `used` says.
inline int64_t UsedRows(const xla::ffi::Buffer<xla::ffi::S32>& used, int64_t count) {
  return std::clamp<int64_t>(used.typed_data()[0], 0, count);
}

}  // namespace plora
