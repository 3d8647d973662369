// Reads and writes parts of rows: their tails, and numbers that are rounded to bfloat16 as they are read.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace plora {

// As `Load`, of the `count` numbers that are there; zeros beyond.
template <typename T>
inline Vec LoadPart(const T* p, int count) {
  if (count >= kLanes) return Load(p);
  T part[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = p[i];
  return Load(part);
}
template <typename T>
inline void StorePart(T* p, Vec v, int count) {
  if (count >= kLanes) return Store(p, v);
  T part[kLanes];
  Store(part, v);
  for (int64_t i = 0; i < count; ++i) p[i] = part[i];
}

// Calls visit(i, count) for each part of a row, of kLanes numbers but for the last; the count is a constant where it can.
template <typename F>
inline void ForParts(int64_t width, const F& visit) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) visit(i, std::integral_constant<int, kLanes>());
  if (i < width) visit(i, static_cast<int>(width - i));
}

// The same by 2 * kLanes.
template <typename F>
inline void ForTwos(int64_t width, const F& visit) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) visit(i, std::integral_constant<int, 2 * kLanes>());
  if (i < width) visit(i, static_cast<int>(width - i));
}

// To the nearest bfloat16 and back; of a NaN only the high bits may be set, as of one that comes from bfloat16.
inline Vec Rounded(Vec v) {
  Word bits = reinterpret_cast<Word>(v);
  return reinterpret_cast<Vec>((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

// As `LoadPart`, of numbers that are bfloat16 or rounded to it.
inline Vec LoadRounded(const uint16_t* p, int count) { return LoadPart(p, count); }
inline Vec LoadRounded(const float* p, int count) {
  uint16_t bits[kLanes];
  Store(bits, LoadPart(p, count));
  return Load(bits);
}

// Thirty-two numbers that are bfloat16, in an order that suits the processor; the same for all.
struct Two {
  Vec a, b;
};
#ifdef __AVX512BF16__
inline Two Split(Half32 pairs) {
  Word word = reinterpret_cast<Word>(pairs);
  return {reinterpret_cast<Vec>(word << 16), reinterpret_cast<Vec>(word & 0xFFFF0000u)};
}
// Rounds thirty-two numbers at once, which takes the processor as long as sixteen.
inline Half32 NarrowTwo(Vec low, Vec high) {
  return reinterpret_cast<Half32>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
}
inline Two LoadTwo(const uint16_t* p) { return Split(LoadPairs(p)); }
inline Two LoadTwo(const float* p) { return Split(NarrowTwo(Load(p), Load(p + kLanes))); }
inline void StoreTwo(uint16_t* p, Two two) {
  Half32 halves = NarrowTwo(two.a, two.b);
  *reinterpret_cast<Half32*>(p) = __builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8,
                                                          24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#else
inline Two LoadTwo(const uint16_t* p) { return {Load(p), Load(p + kLanes)}; }
inline Two LoadTwo(const float* p) {
  uint16_t bits[2 * kLanes];
  Store(bits, Load(p)), Store(bits + kLanes, Load(p + kLanes));
  return LoadTwo(bits);
}
inline void StoreTwo(uint16_t* p, Two two) { Store(p, two.a), Store(p + kLanes, two.b); }
#endif

// As `LoadTwo` and `StoreTwo` of the `count` numbers that are there; zeros beyond.
template <typename T>
inline Two LoadTwo(const T* p, int count) {
  if (count >= 2 * kLanes) return LoadTwo(p);
  T part[2 * kLanes] = {};
  std::copy_n(p, count, part);
  return LoadTwo(part);
}
inline void StoreTwo(uint16_t* p, Two two, int count) {
  if (count >= 2 * kLanes) return StoreTwo(p, two);
  uint16_t part[2 * kLanes];
  StoreTwo(part, two);
  std::copy_n(part, count, p);
}

}  // namespace plora
