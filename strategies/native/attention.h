// Attention of query groups over pages of keys and values, with a running maximum and sum of each row.
//
// One task is a group and one or all of its KV heads; keys and values are read once for all rows of a head, a chunk of
// pages at a time. The order of a row's sums is that of the context, so a result does not depend on what else is in the
// batch nor on the number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace plora {

constexpr float kMasked = -1e30f;

struct ScoreMaths {
  float scale;
  float cap;  // none when 0
  int64_t window;
};

// Rows of a tile that see something of a chunk see its tokens [begin, end).
struct Visible {
  int begin, end;
  bool Empty() const { return begin >= end; }
};

inline Visible VisibleIn(int64_t position, int64_t window, int64_t first, int tokens) {
  if (position < 0) return {0, 0};
  int64_t begin = std::max<int64_t>(position - window + 1 - first, 0);
  int64_t end = std::min<int64_t>(position + 1 - first, tokens);
  return {static_cast<int>(std::min<int64_t>(begin, tokens)), static_cast<int>(std::max<int64_t>(end, 0))};
}

constexpr int kTileRows = 4;

// Pages that are worked on together, which shares the work of a maximum and its consequences.
constexpr int kChunkPages = 4;

// What the numbers of pages stand for: themselves, or their products with the scales of their tokens.
struct Plain {
  static constexpr bool kScaled = false;
};
struct Scales {
  static constexpr bool kScaled = true;
  const float *keys, *values;  // by token of a chunk, in whole vectors
};

// Pages of one head that follow one another in the context.
template <typename T, typename S = Plain>
struct Chunk {
  int pages = 0;
  const T* keys[kChunkPages];
  int64_t value_offset;
  S scales;
};

// The rows of one group and KV head. dim is a multiple of a step.
template <typename Q>
struct Rows {
  const Q* q;
  const int64_t* positions;
  int count, dim;
  float *out, *top;  // `out` is as `Zip` leaves it where the work is in pairs
  Vec* sum;          // by lane
};

// Room for the scores and weights of a tile and chunk.
template <typename P>
struct Room {
  explicit Room(int page_tokens)
      : stride((kChunkPages * page_tokens + kLanes - 1) / kLanes * kLanes),
        scores(kTileRows * stride),
        weights(kTileRows * stride) {}
  const int stride;  // a multiple of kLanes
  std::vector<float> scores;
  std::vector<P> weights;
};

// What is read into the cache while a chunk is worked on, in the order of memory. Ask for a little at a time, and all the
// time: a core waits for lines that it asks for beyond what it can have under way, and memory rests while none are.
template <typename T>
class Ahead {
 public:
  Ahead() = default;
  void Add(const T* from, int64_t count) { from_[parts_] = from, count_[parts_++] = count; }
  // Asks for the next `count` numbers.
  __attribute__((always_inline)) void Read(int64_t count) {
    constexpr int kLine = 64 / sizeof(T);
    for (int64_t i = 0; i < count && part_ < parts_; i += kLine) {
      __builtin_prefetch(from_[part_] + at_, 0, 2);
      at_ += kLine;
      if (at_ >= count_[part_]) ++part_, at_ = 0;
    }
  }

 private:
  const T* from_[2 * kChunkPages];
  int64_t count_[2 * kChunkPages];
  int parts_ = 0, part_ = 0;
  int64_t at_ = 0;
};

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

// acc[r] += sum over tokens [begin, end) of p[r][s] * values[s], kVecs vectors of the head. P is the type of weights:
// where they and the values are pairs, so are two tokens, and `acc` is as `Zip` leaves it.
template <typename T, typename P, int kRows, int kVecs>
inline __attribute__((always_inline)) void Add(const P* p, int stride, const T* values, int dim, int begin, int end,
                                               Ahead<T>& next, Vec (*acc)[kVecs]) {
  if constexpr (kPairs<T, P>) {
    for (int s = begin; s < end; s += 2) {
      bool both = s + 1 < end;
      next.Read(2 * kVecs * kLanes);
      Half32 zipped[kVecs];
      for (int v = 0; v < kVecs; v += 2) {
        const T* at = values + s * dim + v * kLanes;
        Zip(LoadPairs(at), both ? LoadPairs(at + dim) : Half32{}, &zipped[v], &zipped[v + 1]);
      }
      for (int r = 0; r < kRows; ++r) {
        const P* w = p + r * stride + s;
        Half32 weight = both ? SplatPair(w) : SplatPair(static_cast<uint32_t>(*w));
        for (int v = 0; v < kVecs; ++v) acc[r][v] = DotPairs(acc[r][v], zipped[v], weight);
      }
    }
  } else {
    for (int s = begin; s < end; ++s) {
      for (int v = 0; v < kVecs; ++v) {
        Vec value = Load(values + s * dim + v * kLanes);
        for (int r = 0; r < kRows; ++r) acc[r][v] += Widen(p[r * stride + s]) * value;
      }
    }
  }
}

// Turns kRows rows' scores of a chunk into weights, 0 where a row does not see. decay: the factor on what each has summed.
// Scales are in the scores and weights afterwards, but not in the sum; those of tokens that are not seen may be NaN.
template <typename P, int kRows, typename S>
inline __attribute__((always_inline)) void Weigh(float* all_scores, P* all_weights, int stride, int tokens,
                                                 const Visible* seen, const ScoreMaths& maths, const S& scales, float* top,
                                                 Vec* sum, float* decay) {
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec fall = {};
  float largest[kRows];
  for (int r = 0; r < kRows; ++r) {
    float* scores = all_scores + r * stride;
    Vec best = Splat(top[r]);
    for (int s = 0; s < tokens; s += kLanes) {
      Vec score = Load(scores + s) * maths.scale;
      if constexpr (S::kScaled) score *= Load(scales.keys + s);
      if (maths.cap > 0) score = maths.cap * Tanh(score * (1.0f / maths.cap));
      Int at = lane + s;
      score = ((at >= seen[r].begin) & (at < seen[r].end)) ? score : Splat(kMasked);
      best = score > best ? score : best;
      Store(scores + s, score);
    }
    largest[r] = Largest(best);
    fall[r] = top[r] - largest[r];
  }
  Vec factors = Exp(fall);
  for (int r = 0; r < kRows; ++r) {
    const float* scores = all_scores + r * stride;
    P* weights = all_weights + r * stride;
    decay[r] = factors[r];
    // A row that has seen nothing yet has a maximum that masked scores reach too.
    if (seen[r].Empty()) {
      for (int s = 0; s < tokens; s += kLanes) Store(weights + s, Vec{});
      continue;
    }
    Vec total = sum[r] * decay[r];
    for (int s = 0; s < tokens; s += kLanes) {
      Vec weight = Exp(Load(scores + s) - largest[r]);
      total += weight;
      if constexpr (S::kScaled) {
        Int at = lane + s;
        weight = ((at >= seen[r].begin) & (at < seen[r].end)) ? weight * Load(scales.values + s) : Vec{};
      }
      Store(weights + s, weight);
    }
    sum[r] = total;
    top[r] = largest[r];
  }
}

// kRows rows from `row` on over one chunk whose first token is `first`; what is in `next` is read meanwhile.
template <typename T, typename Q, int kRows, typename S>
void AttendTile(const Rows<Q>& rows, int row, const Chunk<T, S>& chunk, int64_t first, int page_tokens,
                const ScoreMaths& maths, Ahead<T>& next, Room<Q>& room) {
  const int dim = rows.dim, stride = room.stride, tokens = chunk.pages * page_tokens;
  Visible each[kRows], any = {tokens, 0};
  for (int r = 0; r < kRows; ++r) {
    each[r] = VisibleIn(rows.positions[row + r], maths.window, first, tokens);
    if (each[r].Empty()) continue;
    any = {std::min(any.begin, each[r].begin), std::max(any.end, each[r].end)};
  }
  if (any.Empty()) return;
  const Q* q = rows.q + static_cast<int64_t>(row) * dim;
  // Calls f with each page that is seen, and the tokens of it that are.
  auto for_pages = [&](auto f) __attribute__((always_inline)) {
    for (int page = any.begin / page_tokens; page * page_tokens < any.end; ++page) {
      int start = page * page_tokens;
      f(page, std::max(any.begin - start, 0), std::min(page_tokens, any.end - start));
    }
  };
  for_pages([&](int page, int begin, int end) __attribute__((always_inline)) {
    float* scores = room.scores.data() + page * page_tokens;
    for (int s = begin / 4 * 4; s < end;) {
      const T* keys = chunk.keys[page] + s * dim;
      if (s + 4 <= page_tokens) {
        next.Read(5 * dim);  // a quarter more than is worked on, as nothing is read while rows are weighed
        Score<T, Q, kRows, 4>(q, keys, dim, scores + s, stride);
        s += 4;
      } else {
        Score<T, Q, kRows, 1>(q, keys, dim, scores + s, stride);
        s += 1;
      }
    }
  });
  float decay[kRows];
  Weigh<Q, kRows>(room.scores.data(), room.weights.data(), stride, tokens, each, maths, chunk.scales, rows.top + row,
                  rows.sum + row, decay);
  auto add = [&](auto vecs, int j) __attribute__((always_inline)) {
    constexpr int kVecs = decltype(vecs)::value;
    float* out = rows.out + static_cast<int64_t>(row) * dim + j;
    Vec acc[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) acc[r][v] = Load(out + r * dim + v * kLanes) * decay[r];
    }
    for_pages([&](int page, int begin, int end) __attribute__((always_inline)) {
      const T* values = chunk.keys[page] + chunk.value_offset + j;
      Add<T, Q, kRows, kVecs>(room.weights.data() + page * page_tokens, stride, values, dim, begin, end, next, acc);
    });
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) Store(out + r * dim + v * kLanes, acc[r][v]);
    }
  };
  constexpr int kVecs = kStep<T, Q> / kLanes;
  int j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) add(std::integral_constant<int, 4>(), j);
  for (; j < dim; j += kVecs * kLanes) add(std::integral_constant<int, kVecs>(), j);
}

template <typename T, typename Q, typename S>
void AttendChunk(const Rows<Q>& rows, const Chunk<T, S>& chunk, int64_t first, int page_tokens, const ScoreMaths& maths,
                 Ahead<T>& next, Room<Q>& room) {
  for (int row = 0; row < rows.count; row += kTileRows) {
    auto tile = AttendTile<T, Q, 4, S>;
    switch (rows.count - row) {
      case 1: tile = AttendTile<T, Q, 1, S>; break;
      case 2: tile = AttendTile<T, Q, 2, S>; break;
      case 3: tile = AttendTile<T, Q, 3, S>; break;
    }
    tile(rows, row, chunk, first, page_tokens, maths, next, room);
  }
}

// The pages [2, heads, tokens, dim] of one layer, and the table of one group.
template <typename T>
struct KvPages {
  using Number = T;
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
  // Where the chunk that begins at `entry` ends: it has neighbours only, and chunks end at the same tokens in any batch.
  int64_t ChunkEnd(int64_t entry, int64_t to) const {
    int64_t limit = std::min(to, (entry / kChunkPages + 1) * kChunkPages);
    while (entry < limit && table[entry] >= 0) ++entry;
    return entry;
  }
  Chunk<T> ChunkOf(int64_t entry, int64_t end, int head) const {
    Chunk<T> chunk;
    chunk.value_offset = value_offset;
    for (; entry < end; ++entry) chunk.keys[chunk.pages++] = Keys(entry, head);
    return chunk;
  }
  // Looks up the addresses of `heads` heads of a chunk, all at once.
  __attribute__((always_inline)) void FindAddresses(int64_t entry, int64_t end, int head, int heads) const {
    for (; entry < end; ++entry) {
      Find(Keys(entry, head), value_offset + heads * head_width);
    }
  }
  const T* Keys(int64_t entry, int head) const { return pages + table[entry] * page_width + head * head_width; }
};

// The chunk that is read after the one at hand, entries [begin, end) of a table; none where `kv` is null.
template <typename T>
struct FirstChunk {
  const KvPages<T>* kv;
  int64_t begin, end;
  int head;
  // All `heads` heads of it from `head` on.
  Ahead<T> Memory(int heads) const {
    Ahead<T> memory;
    for (int64_t entry = begin; kv && entry < end; ++entry) {
      const T* keys = kv->Keys(entry, head);
      memory.Add(keys, heads * kv->head_width);
      memory.Add(keys + kv->value_offset, heads * kv->head_width);
    }
    return memory;
  }
};

// Attention of a group over entries [from, to) of its table, for the KV heads from `head` on that `rows` has, each chunk
// of all of them before the next chunk, which is read meanwhile; `after` is read beside the last.
template <typename Pages, typename HeadRows, typename Space>
void Attend(std::vector<HeadRows>& rows, const Pages& kv, int head, int64_t from, int64_t to, const ScoreMaths& maths,
            const FirstChunk<typename Pages::Number>& after, Space& room) {
  using T = typename Pages::Number;
  const int heads = rows.size();
  to = std::min(to, kv.table_pages);
  for (int64_t entry = kv.Next(from); entry < to;) {
    int64_t end = kv.ChunkEnd(entry, to), following = kv.Next(end);
    const FirstChunk<T> then = following < to ? FirstChunk<T>{&kv, following, kv.ChunkEnd(following, to), head} : after;
    if (then.kv) then.kv->FindAddresses(then.begin, then.end, then.head, heads);
    Ahead<T> next = then.Memory(heads);
    for (int i = 0; i < heads; ++i) {
      AttendChunk(rows[i], kv.ChunkOf(entry, end, head + i), entry * kv.page_tokens, kv.page_tokens, maths, next, room);
    }
    entry = following;
  }
}

// The same for heads whose size is not that of whole steps: pages are widened and padded with zeros first, as q is.
template <typename Pages>
void AttendPadded(const std::vector<Rows<uint32_t>>& rows, const Pages& kv, int head, int64_t from, int64_t to,
                  const ScoreMaths& maths) {
  Room<uint32_t> room(kv.page_tokens);
  Ahead<uint32_t> none;
  const int dim = rows[0].dim;
  const int64_t part = static_cast<int64_t>(kv.page_tokens) * dim;
  std::vector<uint32_t> padded(2 * kChunkPages * part);
  to = std::min(to, kv.table_pages);
  for (int64_t entry = kv.Next(from); entry < to;) {
    int64_t end = kv.ChunkEnd(entry, to);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto chunk = kv.ChunkOf(entry, end, head + i);
      Chunk<uint32_t, std::decay_t<decltype(chunk.scales)>> here;
      here.value_offset = part;
      here.scales = chunk.scales;
      for (; here.pages < chunk.pages; ++here.pages) {
        const auto* from_keys = chunk.keys[here.pages];
        uint32_t* keys = padded.data() + 2 * part * here.pages;
        here.keys[here.pages] = keys;
        for (int s = 0; s < kv.page_tokens; ++s) {
          for (int j = 0; j < kv.dim; ++j) {
            Narrow(Widen(from_keys[s * kv.dim + j]), keys + s * dim + j);
            Narrow(Widen(from_keys[chunk.value_offset + s * kv.dim + j]), keys + part + s * dim + j);
          }
        }
      }
      AttendChunk(rows[i], here, entry * kv.page_tokens, kv.page_tokens, maths, none, room);
    }
    entry = kv.Next(end);
  }
}

}  // namespace plora
