// Products of rows with base weights on the matrix unit (AMX): y[t][o] = sum over k of x[t][k] * w[o][k].
//
// Weights are packed in tiles of 16 outputs and 32 inputs, 1 KB each in the order the unit wants: pairs of inputs, then
// outputs. The tiles of 16 outputs follow one another, so a call reads weights in the order of memory, each once however
// many rows there are. An element's sum runs over its inputs in order: it depends on nothing else in the batch.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "threads.h"
#include "vectors.h"

namespace plora {

constexpr int kTileSide = 16, kTileInputs = 32, kTileNumbers = kTileSide * kTileInputs;

// Whether the matrix unit is there and this process may use it.
inline bool MatrixUnit() {
#ifdef __AMX_BF16__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
}

#ifdef __AMX_BF16__

// Sets the unit up for sums in tiles 0 to 3, rows in 4 and 5, weights in 6 and 7; for the life of an object, on the thread
// that made it. `inner_bytes` of a row are multiplied at once.
class Tiles {
 public:
  explicit Tiles(int inner_bytes = 64) {
    struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = i == 4 || i == 5 ? inner_bytes : 64;
      config.rows[i] = i < 6 ? kTileSide : inner_bytes / 4;
    }
    // GCC takes the instruction to read 8 bytes, and may not store the rest.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// Rows of a product: [count, width] raw bfloat16.
struct ProductRows {
  const uint16_t* x;
  int64_t count, width;
};

constexpr int64_t kStepsAhead = 4;  // tiles of each column
constexpr int kLineNumbers = 32;

// kRows x kColumns tiles of y [., stride] from row tile `row` and output tile `column` on.
template <int kRows, int kColumns>
inline __attribute__((always_inline)) void MultiplyTiles(const ProductRows& rows, int64_t row, const uint16_t* weights,
                                                         float* y, int64_t stride) {
  const int64_t tiles = rows.width / kTileInputs, of_column = tiles * kTileNumbers;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint16_t* x = rows.x + row * kTileSide * rows.width;
  for (int64_t k = 0; k < tiles; ++k) {
    const uint16_t* w = weights + k * kTileNumbers;
    // What is read a few steps later: of these columns, or of those that follow them in memory.
    int64_t later = k + kStepsAhead;
    const uint16_t* ahead = weights + (later < tiles ? later : later - tiles + kColumns * tiles) * kTileNumbers;
    auto bring = [&](int first) __attribute__((always_inline)) {
      for (int i = first; row == 0 && i < first + 4; ++i) {
        __builtin_prefetch(ahead + kLineNumbers * i, 0, 3);
        if (kColumns > 1) __builtin_prefetch(ahead + of_column + kLineNumbers * i, 0, 3);
      }
    };
    bring(0);
    _tile_loadd(4, x + k * kTileInputs, rows.width * 2);
    if (kRows > 1) { _tile_loadd(5, x + kTileSide * rows.width + k * kTileInputs, rows.width * 2); }
    bring(4);
    _tile_loadd(6, w, 64);
    bring(8);
    if (kColumns > 1) { _tile_loadd(7, w + of_column, 64); }
    bring(12);
    _tile_dpbf16ps(0, 4, 6);
    if (kColumns > 1) { _tile_dpbf16ps(1, 4, 7); }
    if (kRows > 1) { _tile_dpbf16ps(2, 5, 6); }
    if (kRows > 1 && kColumns > 1) { _tile_dpbf16ps(3, 5, 7); }
  }
  _tile_stored(0, y, stride * 4);
  if (kColumns > 1) { _tile_stored(1, y + kTileSide, stride * 4); }
  if (kRows > 1) { _tile_stored(2, y + kTileSide * stride, stride * 4); }
  if (kRows > 1 && kColumns > 1) { _tile_stored(3, y + kTileSide * stride + kTileSide, stride * 4); }
}

// One or two tiles of outputs of all rows: y [count, stride]. `last` has the rows of x beyond the whole tiles, and zeros.
template <int kColumns>
inline void MultiplyColumns(const ProductRows& rows, const uint16_t* last, const uint16_t* weights, float* y,
                            int64_t stride) {
  const int64_t tiles = rows.count / kTileSide, left = rows.count % kTileSide;
  int64_t row = 0;
  for (; row + 2 <= tiles; row += 2) {
    MultiplyTiles<2, kColumns>(rows, row, weights, y + row * kTileSide * stride, stride);
  }
  if (row < tiles) MultiplyTiles<1, kColumns>(rows, row, weights, y + row * kTileSide * stride, stride);
  if (left == 0) return;
  constexpr int kWidth = kColumns * kTileSide;
  alignas(64) float room[kTileSide * kWidth];
  MultiplyTiles<1, kColumns>({last, kTileSide, rows.width}, 0, weights, room, kWidth);
  for (int64_t r = 0; r < left; ++r) {
    std::memcpy(y + (tiles * kTileSide + r) * stride, room + r * kWidth, kWidth * sizeof(float));
  }
}

#endif  // __AMX_BF16__

}  // namespace plora
