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
  float scale;
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
template <typename T, typename Q, int kRows, int kTokens>
inline __attribute__((always_inline)) void Score(const Q* q, const T* keys, int dim, float* scores, int stride) {
  Vec acc[kRows][kTokens] = {};
  for (int j = 0; j < dim; j += kStep<T, Q>) {
    for (int r = 0; r < kRows; ++r) {
      for (int s = 0; s < kTokens; ++s) acc[r][s] = DotStep(acc[r][s], keys + s * dim + j, q + r * dim + j);
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
// P is the type of weights: where they and the values are pairs, so are two tokens, and `out` is as `Zip` leaves it.
template <typename T, typename P, int kRows, int kVecs>
inline __attribute__((always_inline)) void Add(const P* p, int stride, const float* decay, const T* values, Visible seen,
                                               int dim, int j, float* out) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Load(out + r * dim + j + v * kLanes) * decay[r];
  }
  if constexpr (kPairs<T, P>) {
    for (int s = seen.begin; s < seen.end; s += 2) {
      bool both = s + 1 < seen.end;
      Half32 zipped[kVecs], weight[kRows];
      for (int v = 0; v < kVecs; v += 2) {
        const T* at = values + s * dim + j + v * kLanes;
        Zip(LoadPairs(at), both ? LoadPairs(at + dim) : Half32{}, &zipped[v], &zipped[v + 1]);
      }
      for (int r = 0; r < kRows; ++r) {
        const P* w = p + r * stride + s;
        weight[r] = both ? SplatPair(w) : SplatPair(static_cast<uint32_t>(*w));
        for (int v = 0; v < kVecs; ++v) acc[r][v] = DotPairs(acc[r][v], zipped[v], weight[r]);
      }
    }
  } else {
    for (int s = seen.begin; s < seen.end; ++s) {
      for (int v = 0; v < kVecs; ++v) {
        Vec value = Load(values + s * dim + j + v * kLanes);
        for (int r = 0; r < kRows; ++r) acc[r][v] += Widen(p[r * stride + s]) * value;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) Store(out + r * dim + j + v * kLanes, acc[r][v]);
  }
}

// The rows of one group and KV head. dim is a multiple of a step.
template <typename Q>
struct Rows {
  const Q* q;
  const int64_t* positions;
  int count, dim;
  float *out, *top;
  Vec* sum;  // by lane
};

// Room for the scores and weights of a tile and page.
template <typename P>
struct Room {
  explicit Room(int page_tokens)
      : stride((page_tokens + kLanes - 1) / kLanes * kLanes), scores(kTileRows * stride), weights(kTileRows * stride) {}
  const int stride;  // a multiple of kLanes
  std::vector<float> scores;
  std::vector<P> weights;
};

// Turns kRows rows' scores of a page into weights, 0 where a row does not see. decay: the factor on what each has summed.
template <typename P, int kRows>
inline __attribute__((always_inline)) void Weigh(Room<P>& room, const Visible* seen, const ScoreMaths& maths, float* top,
                                                 Vec* sum, float* decay) {
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float* scores = room.scores.data();
  P* weights = room.weights.data();
  const int stride = room.stride;
  Vec fall = {};
  float largest[kRows];
  for (int r = 0; r < kRows; ++r) {
    Vec best = Splat(top[r]);
    for (int s = 0; s < stride; s += kLanes) {
      Vec score = Load(scores + r * stride + s) * maths.scale;
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
      for (int s = 0; s < stride; s += kLanes) Store(weights + r * stride + s, Vec{});
      continue;
    }
    Vec total = sum[r] * decay[r];
    for (int s = 0; s < stride; s += kLanes) {
      Vec weight = Exp(Load(scores + r * stride + s) - largest[r]);
      total += weight;
      Store(weights + r * stride + s, weight);
    }
    sum[r] = total;
    top[r] = largest[r];
  }
}

template <typename T>
struct PageAt {
  const T *keys, *values;
};

// kRows rows from `row` on over one page; what is in `next` is read after it.
template <typename T, typename Q, int kRows>
void AttendTile(const Rows<Q>& rows, int row, PageAt<T> page, int64_t first, int page_tokens, const ScoreMaths& maths,
                PageAt<T> next, Room<Q>& room) {
  const int dim = rows.dim, stride = room.stride;
  Visible each[kRows], any = {page_tokens, 0};
  for (int r = 0; r < kRows; ++r) {
    each[r] = VisibleIn(rows.positions[row + r], maths.window, first, page_tokens);
    if (each[r].Empty()) continue;
    any = {std::min(any.begin, each[r].begin), std::max(any.end, each[r].end)};
  }
  if (any.Empty()) return;
  const Q* q = rows.q + static_cast<int64_t>(row) * dim;
  float* scores = room.scores.data();
  for (int s = any.begin / 4 * 4; s < any.end;) {
    if (s + 4 <= page_tokens) {
      Prefetch(next.keys + s * dim, 4 * dim);
      Prefetch(next.values + s * dim, 4 * dim);
      Score<T, Q, kRows, 4>(q, page.keys + s * dim, dim, scores + s, stride);
      s += 4;
    } else {
      Score<T, Q, kRows, 1>(q, page.keys + s * dim, dim, scores + s, stride);
      s += 1;
    }
  }
  float decay[kRows];
  Weigh<Q, kRows>(room, each, maths, rows.top + row, rows.sum + row, decay);
  float* out = rows.out + static_cast<int64_t>(row) * dim;
  const Q* weights = room.weights.data();
  constexpr int kVecs = kStep<T, Q> / kLanes;
  int j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) Add<T, Q, kRows, 4>(weights, stride, decay, page.values, any, dim, j, out);
  for (; j < dim; j += kVecs * kLanes) Add<T, Q, kRows, kVecs>(weights, stride, decay, page.values, any, dim, j, out);
}

template <typename T, typename Q>
void AttendPage(const Rows<Q>& rows, PageAt<T> page, int64_t first, int page_tokens, const ScoreMaths& maths,
                PageAt<T> next, Room<Q>& room) {
  for (int row = 0; row < rows.count; row += kTileRows) {
    auto tile = AttendTile<T, Q, 4>;
    switch (rows.count - row) {
      case 1: tile = AttendTile<T, Q, 1>; break;
      case 2: tile = AttendTile<T, Q, 2>; break;
      case 3: tile = AttendTile<T, Q, 3>; break;
    }
    tile(rows, row, page, first, page_tokens, maths, next, room);
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
  PageAt<T> At(int64_t entry, int head) const {
    const T* keys = pages + table[entry] * page_width + head * head_width;
    return {keys, keys + value_offset};
  }
};

// Attention of a group over entries [from, to) of its table, for the KV heads from `head` on that `rows` has, each page
// of all of them before the next page: what lies together in memory is read together.
template <typename T, typename Q>
void Attend(const std::vector<Rows<Q>>& rows, const KvPages<T>& kv, int head, int64_t from, int64_t to,
            const ScoreMaths& maths) {
  Room<Q> room(kv.page_tokens);
  to = std::min(to, kv.table_pages);
  for (int64_t entry = kv.Next(from); entry < to;) {
    int64_t following = kv.Next(entry + 1), first = entry * kv.page_tokens;
    for (size_t i = 0; i < rows.size(); ++i) {
      PageAt<T> page = kv.At(entry, head + i);
      PageAt<T> next = following < to ? kv.At(following, head + i) : page;
      AttendPage(rows[i], page, first, kv.page_tokens, maths, next, room);
    }
    entry = following;
  }
}

// The same for heads whose size is not that of whole steps: pages are widened and padded with zeros first, as q is.
template <typename T>
void AttendPadded(const std::vector<Rows<uint32_t>>& rows, const KvPages<T>& kv, int head, int64_t from, int64_t to,
                  const ScoreMaths& maths) {
  Room<uint32_t> room(kv.page_tokens);
  int dim = rows[0].dim;
  int64_t part = static_cast<int64_t>(kv.page_tokens) * dim;
  std::vector<uint32_t> padded(2 * part);
  to = std::min(to, kv.table_pages);
  for (int64_t entry = kv.Next(from); entry < to; entry = kv.Next(entry + 1)) {
    for (size_t i = 0; i < rows.size(); ++i) {
      PageAt<T> page = kv.At(entry, head + i);
      for (int s = 0; s < kv.page_tokens; ++s) {
        for (int j = 0; j < kv.dim; ++j) {
          Narrow(Widen(page.keys[s * kv.dim + j]), &padded[s * dim + j]);
          Narrow(Widen(page.values[s * kv.dim + j]), &padded[part + s * dim + j]);
        }
      }
      PageAt<uint32_t> here{padded.data(), padded.data() + part};
      AttendPage(rows[i], here, entry * kv.page_tokens, kv.page_tokens, maths, here, room);
    }
  }
}

}  // namespace plora
