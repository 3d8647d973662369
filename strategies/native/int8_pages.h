// Pages whose keys and values are int8 with a scale of each token and head, as strategies/int8_kv.py keeps them.
//
// A chunk is widened to numbers of the pages' width, which hold its integers exactly, and is then worked on as any other;
// the room that this takes stays in the first cache. Scales are for scores and weights, of which there are fewer.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "rows.h"

namespace plora {

constexpr float kLargestInt = 127;

// Rows whose numbers are all below are of zeros.
constexpr float kTinyRow = 1e-30f;

inline Vec LoadInts(const int8_t* p) {
#ifdef __AVX512F__
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Vec);
#endif
}

// The nearest integers, ties to even, within int8.
inline void StoreInts(int8_t* p, Vec v) {
#ifdef __AVX512F__
  __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(reinterpret_cast<__m512>(v)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
#else
  for (int i = 0; i < kLanes; ++i) {
    float nearest = std::nearbyint(v[i]);
    p[i] = nearest >= -128.0f && nearest <= 127.0f ? static_cast<int8_t>(nearest) : -128;
  }
#endif
}

// Rounds a row to integers; returns its scale.
template <typename X>
inline float Quantize(const X* from, int64_t dim, int8_t* to) {
  // The bits of magnitudes are in their order, with NaN above all.
  Int most = {};
  ForParts(dim, [&](int64_t i, auto count) {
    Int size = reinterpret_cast<Int>(LoadPart(from + i, count)) & 0x7FFFFFFF;
    most = size > most ? size : most;
  });
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = std::max(bits, most[lane]);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const float factor = largest < kTinyRow ? 0.0f : kLargestInt / largest;
  ForParts(dim, [&](int64_t i, auto count) {
    int8_t part[kLanes];
    StoreInts(part, LoadPart(from + i, count) * factor);
    std::memcpy(to + i, part, count);
  });
  return largest * (1 / kLargestInt);
}

inline void WidenInts(const int8_t* from, int64_t count, uint32_t* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadInts(from + i));
  for (; i < count; ++i) Narrow(static_cast<float>(from[i]), to + i);
}
inline void WidenInts(const int8_t* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#ifdef __AVX512BF16__
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    *reinterpret_cast<Half32*>(to + i) = NarrowTwo(LoadInts(from + i), LoadInts(from + i + kLanes));
  }
#endif
  for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadInts(from + i));
  for (; i < count; ++i) Narrow(static_cast<float>(from[i]), to + i);
}

// As KvPages, for one thread: a chunk is there until the next is asked for.
template <typename T>
class Int8Pages : public KvPages<T> {
 public:
  explicit Int8Pages(const KvPages<T>& pages)
      : KvPages<T>(pages),
        part_(static_cast<int64_t>(pages.page_tokens) * pages.dim),
        stride_((kChunkPages * pages.page_tokens + kLanes - 1) / kLanes * kLanes),
        numbers_(2 * kChunkPages * part_),
        scales_(2 * stride_) {}

  Chunk<T, Scales> ChunkOf(int64_t entry, int64_t end, int head) const {
    Chunk<T> kept = KvPages<T>::ChunkOf(entry, end, head);
    float *key_scales = scales_.data(), *value_scales = key_scales + stride_;
    Chunk<T, Scales> chunk;
    chunk.value_offset = part_;
    chunk.scales = {key_scales, value_scales};
    for (; chunk.pages < kept.pages; ++chunk.pages) {
      const T* keys = kept.keys[chunk.pages];
      T* to = numbers_.data() + 2 * part_ * chunk.pages;
      const int tokens_before = chunk.pages * this->page_tokens;
      Widen(keys, to, key_scales + tokens_before);
      Widen(keys + kept.value_offset, to + part_, value_scales + tokens_before);
      chunk.keys[chunk.pages] = to;
    }
    return chunk;
  }

 private:
  void Widen(const T* kept, T* numbers, float* scales) const {
    auto ints = reinterpret_cast<const int8_t*>(kept);
    WidenInts(ints, part_, numbers);
    std::memcpy(scales, ints + part_, this->page_tokens * sizeof(float));
  }

  const int64_t part_, stride_;
  mutable Lines<T> numbers_;
  mutable Lines<float> scales_;
};

}  // namespace plora
