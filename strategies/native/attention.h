// Attention of query groups over pages of keys and values, with a running maximum and sum of each row.
//
// One task is a group and one or all of its KV heads; keys and values of a page are read once for all rows of a head.
// The order of a row's sums is that of the context, so a result does not depend on what else is in the batch nor on the
// number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "vectors.h"

namespace plora {

constexpr float kMasked = -1e30f;

struct ScoreMaths {
  float cap;  // none when 0
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
inline __attribute__((always_inline)) void Score(const float* q, const T* keys, int dim, float* scores, int stride) {
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
inline __attribute__((always_inline)) void Add(const float* p, int stride, const float* decay, const T* values,
                                               Visible seen, int dim, int j, float* out) {
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
  const float* q;  // times the scale of scores
  const int64_t* positions;
  int count, dim;
  float *out, *top;
  Vec* sum;  // by lane
};

// Turns kRows rows' scores of a page into weights, 0 where a row does not see. decay: the factor on what each has summed.
template <int kRows>
inline __attribute__((always_inline)) void Weigh(float* scores, int stride, const Visible* seen, const ScoreMaths& maths,
                                                 float* top, Vec* sum, float* decay) {
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec fall = {};
  float largest[kRows];
  for (int r = 0; r < kRows; ++r) {
    Vec best = Splat(top[r]);
    for (int s = 0; s < stride; s += kLanes) {
      Vec score = Load(scores + r * stride + s);
      if (maths.cap > 0) score = maths.cap * Tanh(score * (1.0f / maths.cap));
      Int at = lane + s;
      score = ((at >= seen[r].begin) & (at < seen[r].end)) ? score : Splat(kMasked);
      best = score > best ? score : best;
      Store(scores + r * stride + s, score);
    }
    largest[r] = Largest(best);
    fall[r] = top[r] - largest[r];
  }
  Vec factors = Exp(fall);
  for (int r = 0; r < kRows; ++r) {
    decay[r] = factors[r];
    // A row that has seen nothing yet has a maximum that masked scores reach too.
    if (seen[r].Empty()) {
      for (int s = 0; s < stride; s += kLanes) Store(scores + r * stride + s, Vec{});
      continue;
    }
    Vec total = sum[r] * decay[r];
    for (int s = 0; s < stride; s += kLanes) {
      Vec weight = Exp(Load(scores + r * stride + s) - largest[r]);
      total += weight;
      Store(scores + r * stride + s, weight);
    }
    sum[r] = total;
    top[r] = largest[r];
  }
}

// kRows rows from `row` on over one page; `scores` has room for kTileRows rows of `stride`, a multiple of kLanes.
template <typename T, int kRows>
void AttendTile(const Rows& rows, int row, const T* keys, const T* values, int64_t first, int page_tokens,
                const ScoreMaths& maths, const T* next_keys, const T* next_values, float* scores, int stride) {
  int dim = rows.dim;
  Visible each[kRows], any = {page_tokens, 0};
  for (int r = 0; r < kRows; ++r) {
    each[r] = VisibleIn(rows.positions[row + r], maths.window, first, page_tokens);
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
  Weigh<kRows>(scores, stride, each, maths, rows.top + row, rows.sum + row, decay);
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

// Attention of a group over entries [from, to) of its table, for the KV heads from `head` on that `rows` has, each page
// of all of them before the next page: what lies together in memory is read together.
template <typename T>
void Attend(const std::vector<Rows>& rows, const KvPages<T>& kv, int head, int64_t from, int64_t to,
            const ScoreMaths& maths) {
  int stride = (kv.page_tokens + kLanes - 1) / kLanes * kLanes, dim = rows[0].dim;
  std::vector<float> scores(static_cast<size_t>(kTileRows) * stride);
  // Heads whose size is not that of whole vectors are widened and padded with zeros first, as their queries are.
  int64_t part = static_cast<int64_t>(kv.page_tokens) * dim;
  std::vector<uint32_t> room(dim == kv.dim ? 0 : 2 * part);
  to = std::min(to, kv.table_pages);
  for (int64_t entry = kv.Next(from); entry < to;) {
    int64_t following = kv.Next(entry + 1), first = entry * kv.page_tokens;
    for (size_t i = 0; i < rows.size(); ++i) {
      const T* keys = kv.Keys(entry, head + i);
      const T* values = keys + kv.value_offset;
      const T* next = following < to ? kv.Keys(following, head + i) : keys;
      if (dim == kv.dim) {
        AttendPage(rows[i], keys, values, first, kv.page_tokens, maths, next, next + kv.value_offset, scores.data(), stride);
        continue;
      }
      for (int s = 0; s < kv.page_tokens; ++s) {
        for (int j = 0; j < kv.dim; ++j) {
          Narrow(Widen(keys[s * kv.dim + j]), &room[s * dim + j]);
          Narrow(Widen(values[s * kv.dim + j]), &room[part + s * dim + j]);
        }
      }
      const uint32_t *k = room.data(), *v = k + part;
      AttendPage(rows[i], k, v, first, kv.page_tokens, maths, k, v, scores.data(), stride);
    }
    entry = following;
  }
}

}  // namespace plora
