// Products of rows with weights of 4 bits in blocks of 32 inputs: y[t][o] = sum over blocks of
// row scale * (scale * sum over k of q[t][k] * w[o][k] + least * sum over k of q[t][k]), q the row's block as 8-bit integers.
//
// A block's sum of integers is exact. Blocks are added in order, one row at a time whatever its company, so a result
// depends on its row and weights alone.
//
// Weights are packed in tiles of 16 outputs and one block, 320 bytes: fours of inputs, then outputs, inputs 0 to 15 in the
// low half of a byte and 16 to 31 in the high one; then 16 scales and 16 least values in float16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "products.h"
#include "vectors.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PLORA_BLOCK_PRODUCTS 1
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PLORA_BLOCK_TILES 1
#endif
#endif

namespace plora {

constexpr int kBlockInputs = 32, kBlockTileBytes = kLanes * (kBlockInputs / 2 + 2 + 2);

#ifdef PLORA_BLOCK_PRODUCTS

// Rows as integers, and by block what a unit of them is worth and what they add up to: what 16 rows have of a block lies
// together, [row tiles, width / 32, 16, 32] and [row tiles, width / 32, 16] twice.
struct BlockRows {
  int8_t* values;
  float *scales, *sums;
  int64_t count, width;

  // Where a block of a row is among the numbers; its integers are 32 times as far.
  int64_t At(int64_t row, int64_t block) const {
    return (row / kTileSide * (width / kBlockInputs) + block) * kTileSide + row % kTileSide;
  }
};

// One block of a row; not finite where a number of it is not, for its bits are compared.
template <typename T>
inline void QuantizeBlock(const T* x, int8_t* values, float* scale, float* sum) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512 first = reinterpret_cast<__m512>(Load(x)), second = reinterpret_cast<__m512>(Load(x + kLanes));
  __m512i most = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(first), magnitude),
                                  _mm512_and_si512(_mm512_castps_si512(second), magnitude));
  const float largest = Widen(static_cast<uint32_t>(_mm512_reduce_max_epu32(most)));
  const __m512 steps = _mm512_set1_ps(largest < 1e-30f ? 0.0f : 127.0f / largest);
  __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(first, steps));
  __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(second, steps));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm512_cvtsepi32_epi8(low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(values + kLanes), _mm512_cvtsepi32_epi8(high));
  *scale = largest * (1.0f / 127.0f);
  *sum = *scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(low, high)));
}

// A tile of weights in registers.
struct BlockTile {
  __m512i fours[8];
  __m512 scales, least;

  inline __attribute__((always_inline)) void Read(const uint8_t* tile) {
    const __m512i half = _mm512_set1_epi8(0x0F);
    for (int i = 0; i < 4; ++i) {
      __m512i both = _mm512_loadu_si512(tile + 64 * i);
      fours[i] = _mm512_and_si512(both, half);
      fours[4 + i] = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    }
    scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 256)));
    least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 288)));
  }
};

constexpr int kBytesAhead = 4096;

// kRows rows from `row` on times one tile of outputs: y [., stride].
template <int kRows>
inline void MultiplyBlocks(const BlockRows& rows, int64_t row, const uint8_t* weights, float* y, int64_t stride) {
  const int64_t blocks = rows.width / kBlockInputs;
  const int64_t first = rows.At(row, 0);
  const int8_t* values = rows.values + first * kBlockInputs;
  const float *scales = rows.scales + first, *sums = rows.sums + first;
  __m512 results[kRows];
  for (int r = 0; r < kRows; ++r) results[r] = _mm512_setzero_ps();
  BlockTile tile;
  for (int64_t b = 0; b < blocks; ++b, weights += kBlockTileBytes) {
    for (int i = 0; row == 0 && i < kBlockTileBytes; i += 64) __builtin_prefetch(weights + kBytesAhead + i, 0, 2);
    tile.Read(weights);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        int32_t four;
        std::memcpy(&four, values + r * kBlockInputs + 4 * i, 4);
        sum = _mm512_dpbusd_epi32(sum, tile.fours[i], _mm512_set1_epi32(four));
      }
      __m512 worth = _mm512_mul_ps(tile.scales, _mm512_set1_ps(scales[r]));
      results[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), worth, results[r]);
      results[r] = _mm512_fmadd_ps(tile.least, _mm512_set1_ps(sums[r]), results[r]);
    }
    values += kTileSide * kBlockInputs, scales += kTileSide, sums += kTileSide;
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y + (row + r) * stride, results[r]);
}

#ifdef PLORA_BLOCK_TILES

// A tile of outputs as the matrix unit takes it: fours [blocks, 8, 64], scales and least values [blocks, 2, 16].
class OpenColumn {
 public:
  void Open(const uint8_t* weights, int64_t blocks) {
    if (fours_.size() < size_t(blocks)) fours_.resize(blocks), numbers_.resize(blocks);
    BlockTile tile;
    for (int64_t b = 0; b < blocks; ++b, weights += kBlockTileBytes) {
      for (int i = 0; i < kBlockTileBytes; i += 64) __builtin_prefetch(weights + kBytesAhead + i, 0, 2);
      tile.Read(weights);
      for (int i = 0; i < 8; ++i) _mm512_store_si512(fours_[b].bytes + 64 * i, tile.fours[i]);
      _mm512_store_ps(numbers_[b].scales, tile.scales);
      _mm512_store_ps(numbers_[b].least, tile.least);
    }
  }
  const uint8_t* Fours(int64_t b) const { return fours_[b].bytes; }
  __m512 Scales(int64_t b) const { return _mm512_load_ps(numbers_[b].scales); }
  __m512 Least(int64_t b) const { return _mm512_load_ps(numbers_[b].least); }

 private:
  struct alignas(64) Fours_ {
    uint8_t bytes[8 * 64];
  };
  struct alignas(64) Numbers {
    float scales[kLanes], least[kLanes];
  };
  std::vector<Fours_> fours_;
  std::vector<Numbers> numbers_;
};

// Sixteen rows from `row` on, of which `stored` are wanted, times one tile of outputs. The matrix unit sums a block while
// the sums of the one before become numbers.
inline void MultiplyBlockTiles(const BlockRows& rows, int64_t row, int stored, const OpenColumn& column, float* y,
                               int64_t stride) {
  alignas(64) int32_t room[2][kTileSide * kTileSide];
  const int64_t blocks = rows.width / kBlockInputs;
  const int64_t first = rows.At(row, 0);
  const int8_t* values = rows.values + first * kBlockInputs;
  const float *scales = rows.scales + first, *sums = rows.sums + first;
  __m512 results[kTileSide];
#pragma GCC unroll 16
  for (int r = 0; r < kTileSide; ++r) results[r] = _mm512_setzero_ps();
  auto multiply = [&](int64_t b) __attribute__((always_inline)) {
    _tile_zero(0);
    _tile_loadd(4, values + b * kTileSide * kBlockInputs, kBlockInputs);
    _tile_loadd(6, column.Fours(b), 64);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, room[b & 1], 64);
  };
  multiply(0);
  for (int64_t b = 0; b < blocks; ++b) {
    if (b + 1 < blocks) multiply(b + 1);
    const __m512 of_column = column.Scales(b), least = column.Least(b);
    const int32_t* of_rows = room[b & 1];
#pragma GCC unroll 16
    for (int r = 0; r < kTileSide; ++r) {
      __m512 worth = _mm512_mul_ps(of_column, _mm512_set1_ps(scales[r]));
      __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(of_rows + r * kTileSide));
      results[r] = _mm512_fmadd_ps(sum, worth, results[r]);
      results[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(sums[r]), results[r]);
    }
    scales += kTileSide, sums += kTileSide;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileSide; ++r) {
    if (r < stored) _mm512_storeu_ps(y + (row + r) * stride, results[r]);
  }
}

constexpr int kFewRows = 8;  // that are multiplied faster without the matrix unit

#endif

// One tile of outputs of all rows: y [count, stride]. The tile's weights stay in the cache while the rows pass; rows are
// there up to the next multiple of 16.
inline void MultiplyBlockColumn(const BlockRows& rows, const uint8_t* weights, float* y, int64_t stride) {
  int64_t row = 0;
#ifdef PLORA_BLOCK_TILES
  if (MatrixUnit() && rows.count > kFewRows) {
    thread_local OpenColumn column;
    column.Open(weights, rows.width / kBlockInputs);
    for (; rows.count - row > kFewRows; row += kTileSide) {
      MultiplyBlockTiles(rows, row, std::min<int64_t>(kTileSide, rows.count - row), column, y, stride);
    }
    if (row >= rows.count) return;
  }
#endif
  for (; row + kTileSide <= rows.count; row += kTileSide) MultiplyBlocks<kTileSide>(rows, row, weights, y, stride);
  if (rows.count & 8) MultiplyBlocks<8>(rows, row, weights, y, stride), row += 8;
  if (rows.count & 4) MultiplyBlocks<4>(rows, row, weights, y, stride), row += 4;
  if (rows.count & 2) MultiplyBlocks<2>(rows, row, weights, y, stride), row += 2;
  if (rows.count & 1) MultiplyBlocks<1>(rows, row, weights, y, stride);
}

#endif  // PLORA_BLOCK_PRODUCTS

}  // namespace plora
