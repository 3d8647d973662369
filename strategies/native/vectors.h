// Sixteen float32 lanes, loaded from float32 or bfloat16 numbers that are kept as raw bits, or int8, and maths on them.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace plora {

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Int __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Word __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
typedef uint16_t Half32 __attribute__((vector_size(4 * kLanes), aligned(2)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16), aligned(4)));

inline float Widen(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float Widen(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float Widen(int8_t number) { return number; }

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline void Narrow(float value, uint16_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bool nan = value != value;
  *out = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline void Narrow(float value, uint32_t* out) { std::memcpy(out, &value, 4); }

inline void Store(uint16_t* p, Vec v) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v))));
#else
  Word bits = reinterpret_cast<Word>(v);
  Word rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  *reinterpret_cast<Half*>(p) = __builtin_convertvector(v == v ? rounded : (bits >> 16) | 0x40, Half);
#endif
}

inline Vec Load(const uint16_t* p) {
#ifdef __AVX512F__
  // Without intrinsics GCC 12 widens in two halves, with four times the shuffles.
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(wide, 16));
#else
  Word word = __builtin_convertvector(*reinterpret_cast<const Half*>(p), Word) << 16;
  return reinterpret_cast<Vec>(word);
#endif
}
// Thirty-two bfloat16 numbers, two a lane.
inline Half32 LoadPairs(const uint16_t* p) { return *reinterpret_cast<const Half32*>(p); }
// The same two numbers in every lane.
inline Half32 SplatPair(uint32_t pair) { return reinterpret_cast<Half32>(Word{} + pair); }
inline Half32 SplatPair(const uint16_t* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return SplatPair(pair);
}

// sum + a.low * b.low + a.high * b.high in each lane.
inline Vec DotPairs(Vec sum, Half32 a, Half32 b) {
#ifdef __AVX512BF16__
  return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                                                reinterpret_cast<__m512bh>(b)));
#else
  Word x = reinterpret_cast<Word>(a), y = reinterpret_cast<Word>(b);
  sum += reinterpret_cast<Vec>(x << 16) * reinterpret_cast<Vec>(y << 16);
  return sum + reinterpret_cast<Vec>(x & 0xFFFF0000u) * reinterpret_cast<Vec>(y & 0xFFFF0000u);
#endif
}

// Two rows of thirty-two numbers as pairs of one of each: 0 to 3 of every eight of a row, and 4 to 7.
inline void Zip(Half32 a, Half32 b, Half32* first, Half32* second) {
  *first = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50,
                                   19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
  *second = __builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22,
                                    54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}
// Sums over what `Zip` gave, back in the order of a row.
inline void Unzip(Vec first, Vec second, Vec* low, Vec* high) {
  *low = __builtin_shufflevector(first, second, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  *high = __builtin_shufflevector(first, second, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

// Integers as floats.
inline Vec Load(const int8_t* p) {
#ifdef __AVX512F__
  __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(wide));
#else
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Vec);
#endif
}
inline Vec Load(const uint32_t* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void Store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline void Store(uint32_t* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec Splat(float x) { return Vec{} + x; }

// Whether two types of raw numbers are multiplied in pairs.
template <typename T, typename X>
constexpr bool kPairs = sizeof(T) == 2 && sizeof(X) == 2;

// Numbers of a row that a step takes: of bfloat16 and int8 a cache line.
template <typename T, typename X>
constexpr int kStep = sizeof(T) == 1 ? 4 * kLanes : kPairs<T, X> ? 2 * kLanes : kLanes;

// sum + a . x, of as many numbers as a step takes.
template <typename T, typename X>
inline Vec DotStep(Vec sum, const T* a, const X* x) {
  if constexpr (kPairs<T, X>) {
    return DotPairs(sum, LoadPairs(a), LoadPairs(x));
  } else {
    for (int i = 0; i < kStep<T, X>; i += kLanes) sum += Load(a + i) * Load(x + i);
    return sum;
  }
}

// Brings `count` numbers into the cache, a line at a time. Any address may be given. (GCC takes a function that only
// prefetches for one without effect and drops calls that it has not inlined.)
template <typename T>
inline __attribute__((always_inline)) void Prefetch(const T* p, int count) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < count; i += kLine) __builtin_prefetch(p + i, 0, 2);
}

// Makes the processor look up the addresses of `count` numbers. Where memory is far larger than the tables that the
// processor keeps, that takes as long as reading several kilobytes (400 ns on a virtual machine), during which a core
// does little else; but it looks up four at a time, so ask for many at once.
template <typename T>
inline __attribute__((always_inline)) void Find(const T* p, int64_t count) {
  constexpr int kPage = 4096 / sizeof(T);
  for (int64_t i = 0; i < count; i += kPage) __builtin_prefetch(p + i, 0, 2);
  __builtin_prefetch(p + count - 1, 0, 2);
}

inline Vec4 Fold(Vec v) {
  Vec8 half =
      __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}
inline float Sum(Vec v) {
  Vec4 four = Fold(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float Largest(Vec v) {
  Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  Vec8 b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  Vec4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  c = c > d ? c : d;
  float x = c[0] > c[2] ? c[0] : c[2], y = c[1] > c[3] ? c[1] : c[3];
  return x > y ? x : y;
}

// The sums of four vectors.
inline Vec4 Sums(const Vec v[4]) {
  auto pairs = [](Vec a, Vec b) {  // of each four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  Vec ab = pairs(v[0], v[1]), cd = pairs(v[2], v[3]);
  return Fold(__builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
}

// exp for x <= 88, relative error 1e-7, 0 below -87. Cephes' polynomial; 2^n comes from the bits of n + 1.5 * 2^23.
inline Vec Exp(Vec x) {
  const Vec low = Splat(-87.0f), magic = Splat(12582912.0f);
  Vec clamped = x < low ? low : x;
  Vec shifted = clamped * 1.44269504f + magic;
  Vec n = shifted - magic;
  Vec r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = Splat(1.9875691500e-4f) * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Int exponent = reinterpret_cast<Int>(shifted) - reinterpret_cast<Int>(magic) + 127;
  // A product, not an addition to the exponent, so that NaN stays NaN.
  Vec result = p * reinterpret_cast<Vec>(exponent << 23);
  return x < low ? Vec{} : result;
}

// Relative error 4e-7: a series where 1 - exp would cancel.
inline Vec Tanh(Vec x) {
  Vec size = x < 0 ? -x : x, e = Exp(-2.0f * size), far = (1.0f - e) / (1.0f + e), square = x * x;
  Vec near = 62.0f / 2835 * square - 17.0f / 315;
  near = near * square + 2.0f / 15;
  near = near * square - 1.0f / 3;
  near = near * square * x + x;
  return size < 0.25f ? near : (x < 0 ? -far : far);
}

// Memory that begins at a cache line.
template <typename N>
class Lines {
 public:
  explicit Lines(int64_t count) : lines_((count * sizeof(N) + 63) / 64) {}
  N* data() { return reinterpret_cast<N*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    uint8_t bytes[64] = {};
  };
  std::vector<Line> lines_;
};

}  // namespace plora
