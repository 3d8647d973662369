// Attention of query groups over pages of keys and values, with a running maximum and sum of each row.
//
// One task is a group and a KV head: its pages are read once for all rows. The order of a row's sums is that of the
// context, so a result does not depend on what else is in the batch nor on the number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "vectors.h"

namespace plora {

constexpr float kMasked = -1e30f;

struct ScoreMaths {
  float scale, cap;  // no cap when 0
  int64_t window;
};

// Rows of a tile that see something of a page see its tokens [begin, end).
struct Visible {
  int begin, end;
  bool Empty() const { return begin >= end; }
};

inline Visible VisibleIn(int64_t position, int64_t window, int64_t first, int page_tokens) {
  if (position < 0) return {0, 0};
  int64_t begin = std::max<int64_t>(position - window + 1 - first, 0);
  int64_t end = std::min<int64_t>(position + 1 - first, page_tokens);
  return {static_cast<int>(std::min<int64_t>(begin, page_tokens)), static_cast<int>(std::max<int64_t>(end, 0))};
}

constexpr int kTileRows = 4;

// scores[r * stride + s] = q[r] . keys[s] for kTokens (4 or 1) tokens of a page.
template <typename T, int kRows, int kTokens>
void Score(const float* q, const T* keys, int dim, float* scores, int stride) {
  Vec acc[kRows][kTokens] = {};
  for (int j = 0; j < dim; j += kLanes) {
    Vec k[kTokens];
    for (int s = 0; s < kTokens; ++s) k[s] = Load(keys + s * dim + j);
    for (int r = 0; r < kRows; ++r) {
      Vec query = Load(q + r * dim + j);
      for (int s = 0; s < kTokens; ++s) acc[r][s] += query * k[s];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kTokens == 4) {
      *reinterpret_cast<Vec4*>(scores + r * stride) = Sums(acc[r]);
    } else {
      scores[r * stride] = Sum(acc[r][0]);
    }
  }
}

// out[r] = out[r] * decay[r] + sum over tokens [begin, end) of p[r][s] * values[s], kVecs vectors of the head from j on.
template <typename T, int kRows, int kVecs>
void Add(const float* p, int stride, const float* decay, const T* values, Visible seen, int dim, int j, float* out) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Load(out + r * dim + j + v * kLanes) * decay[r];
  }
  for (int s = seen.begin; s < seen.end; ++s) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = Load(values + s * dim + j + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      Vec weight = Splat(p[r * stride + s]);
      for (int v = 0; v < kVecs; ++v) acc[r][v] += weight * value[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) Store(out + r * dim + j + v * kLanes, acc[r][v]);
  }
}

// The rows of one group and KV head. dim is a multiple of kLanes.
struct Rows {
  const float* q;
  const int32_t* positions;  // by query
  int repeats, count, dim;
  float *out, *top, *sum;

  int64_t Position(int row) const { return positions[row / repeats]; }
};

// Turns a row's scores of a page into weights, 0 where it does not see; the factor on what it has summed so far.
inline float Weigh(float* scores, int stride, Visible seen, const ScoreMaths& maths, float* top, float* sum) {
  if (seen.Empty()) {
    for (int s = 0; s < stride; s += kLanes) Store(scores + s, Vec{});
    return 1.0f;
  }
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec best = Splat(*top), total = {};
  for (int s = 0; s < stride; s += kLanes) {
    Vec score = Load(scores + s) * maths.scale;
    if (maths.cap > 0) score = maths.cap * Tanh(score * (1.0f / maths.cap));
    Int at = lane + s;
    score = ((at >= seen.begin) & (at < seen.end)) ? score : Splat(kMasked);
    best = score > best ? score : best;
    Store(scores + s, score);
  }
  float largest = Largest(best);
  for (int s = 0; s < stride; s += kLanes) {
    Vec weight = Exp(Load(scores + s) - largest);
    total += weight;
    Store(scores + s, weight);
  }
  float decay = Exp(Splat(*top - largest))[0];
  *sum = *sum * decay + Sum(total);
  *top = largest;
  return decay;
}

// kRows rows from `row` on over one page; `scores` has room for kTileRows rows of `stride`, a multiple of kLanes.
template <typename T, int kRows>
void AttendTile(const Rows& rows, int row, const T* keys, const T* values, int64_t first, int page_tokens,
                const ScoreMaths& maths, const T* next_keys, const T* next_values, float* scores, int stride) {
  int dim = rows.dim;
  Visible each[kRows], any = {page_tokens, 0};
  for (int r = 0; r < kRows; ++r) {
    each[r] = VisibleIn(rows.Position(row + r), maths.window, first, page_tokens);
    if (each[r].Empty()) continue;
    any = {std::min(any.begin, each[r].begin), std::max(any.end, each[r].end)};
  }
  if (any.Empty()) return;
  const float* q = rows.q + static_cast<int64_t>(row) * dim;
  for (int s = any.begin / 4 * 4; s < any.end;) {
    if (s + 4 <= page_tokens) {
      Prefetch(next_keys + s * dim, 4 * dim);
      Prefetch(next_values + s * dim, 4 * dim);
      Score<T, kRows, 4>(q, keys + s * dim, dim, scores + s, stride);
      s += 4;
    } else {
      Score<T, kRows, 1>(q, keys + s * dim, dim, scores + s, stride);
      s += 1;
    }
  }
  float decay[kRows];
  for (int r = 0; r < kRows; ++r) {
    decay[r] = Weigh(scores + r * stride, stride, each[r], maths, rows.top + row + r, rows.sum + row + r);
  }
  float* out = rows.out + static_cast<int64_t>(row) * dim;
  int j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) Add<T, kRows, 4>(scores, stride, decay, values, any, dim, j, out);
  for (; j < dim; j += kLanes) Add<T, kRows, 1>(scores, stride, decay, values, any, dim, j, out);
}

template <typename T>
void AttendPage(const Rows& rows, const T* keys, const T* values, int64_t first, int page_tokens, const ScoreMaths& maths,
                const T* next_keys, const T* next_values, float* scores, int stride) {
  for (int row = 0; row < rows.count; row += kTileRows) {
    auto tile = AttendTile<T, 4>;
    switch (rows.count - row) {
      case 1: tile = AttendTile<T, 1>; break;
      case 2: tile = AttendTile<T, 2>; break;
      case 3: tile = AttendTile<T, 3>; break;
    }
    tile(rows, row, keys, values, first, page_tokens, maths, next_keys, next_values, scores, stride);
  }
}

// The pages [2, heads, tokens, dim] of one layer, and the table of one group.
template <typename T>
struct KvPages {
  const T* pages;
  int64_t page_width, head_width, value_offset;
  int page_tokens, dim;
  const int32_t* table;
  int64_t table_pages;

  // The next page at or after `entry` that is here, or `table_pages`.
  int64_t Next(int64_t entry) const {
    while (entry < table_pages && table[entry] < 0) ++entry;
    return entry;
  }
  const T* Keys(int64_t entry, int head) const { return pages + table[entry] * page_width + head * head_width; }
};

// Attention of a group's rows over entries [from, to) of its table.
template <typename T>
void Attend(const Rows& rows, const KvPages<T>& kv, int head, int64_t from, int64_t to, const ScoreMaths& maths) {
  int stride = (kv.page_tokens + kLanes - 1) / kLanes * kLanes;
  std::vector<float> scores(static_cast<size_t>(kTileRows) * stride);
  // Heads whose size is not that of whole vectors are widened and padded with zeros first, as their queries are.
  bool padded = rows.dim != kv.dim;
  std::vector<uint32_t> room(padded ? 2 * static_cast<size_t>(kv.page_tokens) * rows.dim : 0);
  to = std::min(to, kv.table_pages);
  for (int64_t entry = kv.Next(from); entry < to;) {
    int64_t following = kv.Next(entry + 1), first = entry * kv.page_tokens;
    const T* keys = kv.Keys(entry, head);
    const T* next = following < to ? kv.Keys(following, head) : keys;
    if (padded) {
      uint32_t* wide = room.data();
      for (int part = 0; part < 2; ++part) {
        const T* from_row = keys + part * kv.value_offset;
        for (int s = 0; s < kv.page_tokens; ++s, wide += rows.dim, from_row += kv.dim) {
          for (int j = 0; j < kv.dim; ++j) Narrow(Widen(from_row[j]), wide + j);
        }
      }
      const uint32_t* k = room.data();
      const uint32_t* v = k + static_cast<int64_t>(kv.page_tokens) * rows.dim;
      AttendPage(rows, k, v, first, kv.page_tokens, maths, k, v, scores.data(), stride);
    } else {
      AttendPage(rows, keys, keys + kv.value_offset, first, kv.page_tokens, maths, next, next + kv.value_offset,
                 scores.data(), stride);
    }
    entry = following;
  }
}

}  // namespace plora
