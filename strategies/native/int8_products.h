// Products of rows with int8 weights on the matrix unit (AMX): y[t][o] = row scale[t] * weight scale[o] * sum over k of
// q[t][k] * w[o][k], with q the row as 16-bit integers.
//
// A row's integer is 256 * high + low, two digits of 8 bits. Each digit is multiplied as it is, into sums of 32 bits that
// nothing rounds, so a result depends on its row and weights alone, in whatever order they are added. One digit would
// cost half the arithmetic, but rows have outliers: the default model loses 4 % in perplexity with 8 bits, 0.3 with 16.
//
// Weights are packed in tiles of 16 outputs and 64 inputs, 1 KB each in the order the unit wants: fours of inputs, then
// outputs. Rows are packed alike: of each 16 rows and 64 inputs a tile of high digits, then one of low ones.

#pragma once

#include "products.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VBMI__)
#define PLORA_INT8_UNIT 1
#endif

namespace plora {

constexpr int kByteInputs = 64, kTileBytes = kTileSide * kByteInputs, kDigits = 2;
constexpr float kMostDigits = 32639.0f;  // 127 * 256 + 127, the largest of two digits.

#ifdef PLORA_INT8_UNIT

// Rows as digits [row tiles, width / 64, 2, 16, 64] and what a unit of each is worth.
struct DigitRows {
  const int8_t* digits;
  const float* scales;
  int64_t count, width;
  const int8_t* Tile(int64_t row) const { return digits + row * width * kDigits; }
};

// The largest magnitude; compared as bits, so NaN is larger than infinity.
inline float LargestMagnitude(const uint16_t* x, int64_t width) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < width; i += 32) {
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  }
  __m512i even = _mm512_slli_epi32(most, 16), odd = _mm512_and_si512(most, _mm512_set1_epi32(0x7FFF0000));
  return Widen(static_cast<uint32_t>(_mm512_reduce_max_epu32(_mm512_max_epu32(even, odd))));
}
inline float LargestMagnitude(const uint32_t* x, int64_t width) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < width; i += 16) {
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  }
  return Widen(static_cast<uint32_t>(_mm512_reduce_max_epu32(most)));
}

// Bytes 0 of 32 words, or bytes 1.
inline __m256i BytesOf(__m512i first, __m512i second, int byte) {
  alignas(64) static constexpr uint8_t kFours[64] = {
      0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116,
      120, 124};
  __m512i pick = _mm512_add_epi8(_mm512_load_si512(kFours), _mm512_set1_epi8(byte));
  return _mm512_castsi512_si256(_mm512_permutex2var_epi8(first, pick, second));
}

// One row into row `row` of the tiles that start at `digits`; its scale is returned.
template <typename T>
inline float SplitRow(const T* x, int64_t width, float largest, int8_t* digits, int row) {
  const float steps = largest > 1e-30f ? kMostDigits / largest : 0.0f;
  const __m512i half = _mm512_set1_epi32(128);
  for (int64_t i = 0; i < width; i += 32) {
    __m512i first = _mm512_cvtps_epi32(reinterpret_cast<__m512>(Load(x + i) * steps));
    __m512i second = _mm512_cvtps_epi32(reinterpret_cast<__m512>(Load(x + i + kLanes) * steps));
    int8_t* high = digits + i / kByteInputs * kDigits * kTileBytes + row * kByteInputs + i % kByteInputs;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high),
                        BytesOf(_mm512_add_epi32(first, half), _mm512_add_epi32(second, half), 1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + kTileBytes), BytesOf(first, second, 0));
  }
  return largest * (1.0f / kMostDigits);
}

// Sums of up to 16 rows and one or two tiles of outputs, and where they go: [columns, 2, 16, 16].
struct DigitSums {
  const int32_t* sums;
  const float *row_scales, *scales;
  float* y;
  int64_t stride;
  int rows, columns;
};

// Makes results of sums, a few vectors at a time between products: they hide behind the matrix unit's time.
class Finisher {
 public:
  void Start(const DigitSums& sums) { sums_ = sums, at_ = 0, end_ = sums.rows * sums.columns; }
  void Some(int count) {
    for (; count > 0 && at_ < end_; --count) One();
  }
  void Rest() {
    while (at_ < end_) One();
  }

 private:
  inline __attribute__((always_inline)) void One() {
    int column = at_ >= sums_.rows, row = at_ - column * sums_.rows;
    const int32_t* high = sums_.sums + (column * kDigits * kTileSide + row) * kTileSide;
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(high)), _mm512_set1_ps(256.0f),
                                 _mm512_cvtepi32_ps(_mm512_load_si512(high + kTileSide * kTileSide)));
    __m512 of_row = _mm512_mul_ps(sum, _mm512_set1_ps(sums_.row_scales[row]));
    _mm512_storeu_ps(sums_.y + row * sums_.stride + column * kTileSide,
                     _mm512_mul_ps(of_row, _mm512_loadu_ps(sums_.scales + column * kTileSide)));
    ++at_;
  }

  DigitSums sums_{};
  int at_ = 0, end_ = 0;
};

// What is read from memory meanwhile: four times `lines` cache lines for each tile of inputs.
struct Ahead {
  const int8_t* at;
  int lines;
  inline __attribute__((always_inline)) void Read() {
    for (int i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Sums of 16 rows `x` and one or two tiles of outputs; results of `before` are finished meanwhile.
template <int kColumns>
inline __attribute__((always_inline)) void MultiplyDigits(const int8_t* x, const int8_t* weights, int64_t tiles,
                                                          Ahead ahead, Finisher* before, int32_t* sums) {
  constexpr int kSome = 4, kSums = kTileSide * kTileSide;
  const int64_t of_column = tiles * kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < tiles; ++k, x += kDigits * kTileBytes, weights += kTileBytes) {
    _tile_loadd(6, weights, 64);
    _tile_loadd(4, x, 64);
    _tile_dpbssd(0, 4, 6);
    ahead.Read();
    _tile_loadd(5, x + kTileBytes, 64);
    _tile_dpbssd(1, 5, 6);
    ahead.Read();
    if (kColumns > 1) {
      _tile_loadd(7, weights + of_column, 64);
      _tile_dpbssd(2, 4, 7);
      ahead.Read();
      _tile_dpbssd(3, 5, 7);
      ahead.Read();
    }
    before->Some(kSome);
  }
  before->Rest();
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSums, 64);
  if (kColumns > 1) {
    _tile_stored(2, sums + 2 * kSums, 64);
    _tile_stored(3, sums + 3 * kSums, 64);
  }
}

constexpr int64_t kBlockBytes = 1 << 18;  // Weights that stay in the cache while many rows pass.

// `columns` tiles of outputs of all rows: y [count, stride].
inline void MultiplyInt8(const DigitRows& rows, const int8_t* weights, const float* scales, int64_t columns, float* y,
                         int64_t stride) {
  alignas(64) int32_t room[2][2 * kDigits * kTileSide * kTileSide];
  Finisher finisher;
  const int64_t tiles = rows.width / kByteInputs, of_column = tiles * kTileBytes;
  const int64_t passes = (rows.count + kTileSide - 1) / kTileSide;
  // Few rows pass each pair of tiles at once, and the next pair is read meanwhile; many pass a block of them.
  const int64_t block = passes <= 2 ? 2 : std::max<int64_t>(2, kBlockBytes / of_column / 2 * 2);
  int which = 0;
  for (int64_t begin = 0; begin < columns; begin += block) {
    const int64_t end = std::min(columns, begin + block);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = pass * kTileSide;
      for (int64_t column = begin; column < end; column += 2) {
        const int8_t* w = weights + column * of_column;
        Ahead ahead{w + 2 * of_column, pass == 0 ? 8 : 0};
        if (passes == 2) ahead = {w + (2 + pass) * of_column, 4};
        DigitSums sums{room[which], rows.scales + row, scales + column * kTileSide, y + row * stride + column * kTileSide,
                       stride, static_cast<int>(std::min<int64_t>(kTileSide, rows.count - row)),
                       static_cast<int>(std::min<int64_t>(2, columns - column))};
        auto multiply = sums.columns == 2 ? MultiplyDigits<2> : MultiplyDigits<1>;
        multiply(rows.Tile(row), w, tiles, ahead, &finisher, room[which]);
        finisher.Start(sums);
        which ^= 1;
      }
    }
  }
  finisher.Rest();
}

#endif  // PLORA_INT8_UNIT

}  // namespace plora
