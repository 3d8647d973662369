// Shrink and expand over adapters in pages.
//
// m[t] = scale * (x[t] . a[r]) for the rank components r of t's adapter, y[t] = sum over r of m[t][r] * b[r].
// Each component is read once a call however many tokens use it. A token's sums run in the order of its adapter's
// components and of their numbers, so a result depends neither on what else is in the batch nor on how the work is cut.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace plora {

using Ints = xla::ffi::Span<const int32_t>;

// A or B of a lane's adapters: rows of `widths[projection]` numbers end to end over the pages of a table.
template <typename T>
struct Side {
  const T* pages;  // of one layer
  int64_t page_width;
  const int32_t* tables;
  int64_t table_pages;
  const int32_t* ranks;
  Ints widths;

  const int32_t* RanksOf(int adapter) const { return ranks + adapter * static_cast<int64_t>(widths.size()); }
  // Where a projection's first row lies in its adapter's stream.
  int64_t Start(int adapter, int projection) const {
    int64_t start = 0;
    for (int j = 0; j < projection; ++j) start += static_cast<int64_t>(RanksOf(adapter)[j]) * widths[j];
    return start;
  }
  const T* At(int adapter, int64_t number) const {
    int64_t entry = std::min(number / page_width, table_pages - 1);
    return pages + tables[adapter * table_pages + entry] * page_width + number % page_width;
  }
  void Copy(int adapter, int64_t number, int64_t count, T* to) const {
    while (count > 0) {
      int64_t here = std::min(count, page_width - number % page_width);
      std::memcpy(to, At(adapter, number), here * sizeof(T));
      number += here, count -= here, to += here;
    }
  }
  // Looks up the addresses of numbers that are read soon, but where pages lie one after another: there the processor
  // looks up by itself, and lines touched out of order keep its prefetchers from running ahead.
  __attribute__((always_inline)) void FindAddresses(int adapter, int64_t number, int64_t count) const {
    const T* expected = nullptr;
    while (count > 0) {
      int64_t here = std::min(count, page_width - number % page_width);
      const T* from = At(adapter, number);
      if (from != expected) Find(from, here);
      expected = from + here;
      number += here, count -= here;
    }
  }
};

// Pages lie anywhere, and the processor's prefetchers stop at the end of each, so rows are brought into the second-level
// cache so many bytes before their use. Without, 32 adapters take 35 % longer; from 1.5 to 9 KB it makes little difference.
constexpr int64_t kAheadBytes = 8192;

template <typename T>
int RowsAhead(int64_t width) {
  return std::max<int64_t>(1, (kAheadBytes + width * sizeof(T) / 2) / (width * sizeof(T)));
}

// Tokens of an adapter from which on the work is bound by arithmetic: more rows of B are multiplied at once.
constexpr int kManyTokens = 4;

// Room of this thread for one use, such as rows that lie in several pages; what the call before left there.
template <typename T, int kUse = 0>
T* Scratch(size_t count) {
  static thread_local std::vector<T> room;
  if (room.size() < count) room.resize(count);
  return room.data();
}

// What is read after a piece: its first rows are brought into the cache at the end of the piece.
template <typename T>
struct After {
  const T* first;
  int64_t stride;
  const T* Row(int i) const { return first + i * stride; }
};

// Rows of a stream one after another, each `width` numbers from a place that is `stride` numbers after the one before.
// Keeps page and offset as it goes: a division for each row would take as long as a narrow row does.
template <typename T>
class Walk {
 public:
  Walk(const Side<T>& side, int adapter, int64_t number, int64_t stride, int64_t width)
      : side_(side), adapter_(adapter), number_(number), stride_(stride), width_(width), offset_(number % side.page_width) {
    page_ = side.At(adapter, number) - offset_;
  }
  const T* At() const { return page_ + offset_; }
  // This row in one piece: in its page, or in `room` when it lies in several.
  const T* Find(T* room) const {
    if (offset_ + width_ <= side_.page_width) return At();
    side_.Copy(adapter_, number_, width_, room);
    return room;
  }
  void Step() {
    number_ += stride_, offset_ += stride_;
    if (offset_ < side_.page_width) return;
    offset_ = number_ % side_.page_width;
    page_ = side_.At(adapter_, number_) - offset_;
  }

 private:
  const Side<T>& side_;
  int adapter_;
  int64_t number_, stride_, width_, offset_;
  const T* page_;
};

// Which tokens use an adapter.
class Users {
 public:
  Users(const int32_t* owner, int tokens, int adapters) : first_(adapters + 1), tokens_(tokens) {
    auto valid = [&](int t) { return owner[t] >= 0 && owner[t] < adapters; };
    for (int t = 0; t < tokens; ++t) {
      if (valid(t)) ++first_[owner[t] + 1];
    }
    for (int e = 0; e < adapters; ++e) first_[e + 1] += first_[e];
    std::vector<int> next(first_);
    for (int t = 0; t < tokens; ++t) {
      if (valid(t)) tokens_[next[owner[t]]++] = t;
    }
  }
  int Adapters() const { return first_.size() - 1; }
  int Count(int adapter) const { return first_[adapter + 1] - first_[adapter]; }
  const int* Of(int adapter) const { return tokens_.data() + first_[adapter]; }

 private:
  std::vector<int> first_, tokens_;
};

// What one task does: rows (of A) or columns (of B) [begin, end) of a projection of an adapter.
struct Piece {
  int adapter, at, begin, end;  // `at` in the group
  int64_t cost;
};

constexpr int64_t kSmallestPiece = 1 << 14;

// The first rows of A that a piece of `Shrink` reads.
template <typename T>
After<T> FirstRows(const Side<T>& a, const Piece& piece, int projection) {
  int64_t width = a.widths[projection];
  return {a.At(piece.adapter, a.Start(piece.adapter, projection) + piece.begin * width), width};
}
template <typename T>
__attribute__((always_inline)) inline void FindRows(const Side<T>& a, const Piece& piece, int projection) {
  int64_t width = a.widths[projection], start = a.Start(piece.adapter, projection);
  a.FindAddresses(piece.adapter, start + piece.begin * width, (piece.end - piece.begin) * width);
}
// The first columns of B that a piece of `Expand` reads.
template <typename T>
After<T> FirstColumns(const Side<T>& b, const Piece& piece, int projection) {
  return {b.At(piece.adapter, b.Start(piece.adapter, projection) + piece.begin), b.widths[projection]};
}
template <typename T>
__attribute__((always_inline)) inline void FindColumns(const Side<T>& b, const Piece& piece, int projection) {
  int64_t numbers = static_cast<int64_t>(b.widths[projection]) * b.RanksOf(piece.adapter)[projection];
  b.FindAddresses(piece.adapter, b.Start(piece.adapter, projection), numbers);
}

// Cuts pieces so that every thread gets some, at multiples of `grain`.
inline std::vector<Piece> Cut(const std::vector<Piece>& whole, int threads, int grain) {
  int64_t total = 0;
  for (const Piece& piece : whole) total += piece.cost;
  int64_t most = std::max(kSmallestPiece, total / (4 * std::max(threads, 1)));
  std::vector<Piece> pieces;
  for (const Piece& piece : whole) {
    int64_t extent = piece.end - piece.begin, parts = std::max<int64_t>(1, (piece.cost + most / 2) / most);
    int64_t step = ((extent + parts - 1) / parts + grain - 1) / grain * grain;
    for (int64_t i = 0; i < extent; i += step) {
      int64_t stop = std::min(i + step, extent);
      pieces.push_back({piece.adapter, piece.at, static_cast<int>(piece.begin + i), static_cast<int>(piece.begin + stop),
                        piece.cost * (stop - i) / extent});
    }
  }
  return pieces;
}

inline std::vector<int64_t> Costs(const std::vector<Piece>& pieces) {
  std::vector<int64_t> costs;
  for (const Piece& piece : pieces) costs.push_back(piece.cost);
  return costs;
}

// sums[r][t] = rows[r] . x[t]
template <typename T, typename X, int kRows, int kTokens>
void Dots(const T* const* rows, const T* const* next, const X* const* x, int width, float (*sums)[4]) {
  constexpr int kWide = kStep<T, X>, kLine = 64 / sizeof(T);
  Vec acc[4][kTokens] = {};
  int whole = width / kWide * kWide;
  for (int k = 0; k < whole; k += kWide) {
    for (int r = 0; r < kRows; ++r) {
      if (k % kLine == 0) __builtin_prefetch(next[r] + k, 0, 2);
      for (int t = 0; t < kTokens; ++t) acc[r][t] = DotStep(acc[r][t], rows[r] + k, x[t] + k);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    const Vec of_token[4] = {acc[0][t], acc[1][t], acc[2][t], acc[3][t]};
    Vec4 all = Sums(of_token);
    for (int r = 0; r < kRows; ++r) {
      float sum = all[r];
      for (int k = whole; k < width; ++k) sum += Widen(rows[r][k]) * Widen(x[t][k]);
      sums[r][t] = sum;
    }
  }
}

// y[t][k] += sum over r of m[t][r] * rows[r][k]; from 0 when `fresh`. Rows are added one after the other, or pair after
// pair, so that y has the same bits however many are added at once. With pairs y is zipped, as `Give` finds it.
template <typename T, typename M, int kRows, int kTokens>
void AddRows(const T* const* rows, const T* const* next, const M* const* m, float* const* y, int width, bool fresh) {
  constexpr int kWide = kStep<T, M>, kLine = 64 / sizeof(T);
  int whole = width / kWide * kWide;
  for (int k = 0; k < whole; k += kWide) {
    for (int r = 0; r < kRows; ++r) {
      if (k % kLine == 0) __builtin_prefetch(next[r] + k, 0, 2);
    }
    if constexpr (sizeof(T) == 1) {
      Vec acc[kTokens][4];
      for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < 4; ++i) acc[t][i] = fresh ? Vec{} : Load(y[t] + k + i * kLanes);
      }
      for (int r = 0; r < kRows; ++r) {
        for (int t = 0; t < kTokens; ++t) {
          const Vec factor = Splat(Widen(m[t][r]));
          for (int i = 0; i < 4; ++i) acc[t][i] += factor * Load(rows[r] + k + i * kLanes);
        }
      }
      for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < 4; ++i) Store(y[t] + k + i * kLanes, acc[t][i]);
      }
    } else if constexpr (kPairs<T, M>) {
      Vec acc[kTokens][2];
      for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < 2; ++i) acc[t][i] = fresh ? Vec{} : Load(y[t] + k + i * kLanes);
      }
      for (int r = 0; r < kRows; r += 2) {
        Half32 zipped[2];
        Zip(LoadPairs(rows[r] + k), r + 1 < kRows ? LoadPairs(rows[r + 1] + k) : Half32{}, &zipped[0], &zipped[1]);
        for (int t = 0; t < kTokens; ++t) {
          Half32 f = r + 1 < kRows ? SplatPair(m[t] + r) : SplatPair(static_cast<uint32_t>(m[t][r]));
          for (int i = 0; i < 2; ++i) acc[t][i] = DotPairs(acc[t][i], zipped[i], f);
        }
      }
      for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < 2; ++i) Store(y[t] + k + i * kLanes, acc[t][i]);
      }
    } else {
      Vec acc[kTokens];
      for (int t = 0; t < kTokens; ++t) acc[t] = fresh ? Vec{} : Load(y[t] + k);
      for (int r = 0; r < kRows; ++r) {
        Vec b = Load(rows[r] + k);
        for (int t = 0; t < kTokens; ++t) acc[t] += Widen(m[t][r]) * b;
      }
      for (int t = 0; t < kTokens; ++t) Store(y[t] + k, acc[t]);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int k = whole; k < width; ++k) {
      float sum = fresh ? 0.0f : y[t][k];
      for (int r = 0; r < kRows; ++r) sum += Widen(m[t][r]) * Widen(rows[r][k]);
      y[t][k] = sum;
    }
  }
}

// Gives what `AddRows` has left to y, or adds it to what is there when `onto`.
template <typename T, typename M>
void Give(const float* from, float* y, int width, bool onto) {
  constexpr int kWide = kPairs<T, M> ? 2 * kLanes : kLanes;
  int whole = width / kStep<T, M> * kStep<T, M>;
  for (int k = 0; k < whole; k += kWide) {
    Vec parts[2] = {Load(from + k)};
    if constexpr (kPairs<T, M>) Unzip(parts[0], Load(from + k + kLanes), &parts[0], &parts[1]);
    for (int i = 0; i < kWide / kLanes; ++i) {
      float* to = y + k + i * kLanes;
      Store(to, onto ? Load(to) + parts[i] : parts[i]);
    }
  }
  for (int k = whole; k < width; ++k) y[k] = onto ? y[k] + from[k] : from[k];
}

// m[t][r] for the rows of a piece. x [T, I]; X and M are the raw types of x and m.
template <typename T, typename X, typename M>
void Shrink(const Side<T>& a, const Piece& piece, int projection, const Users& users, const X* x, float scale, M* m,
            int64_t stride, After<T> after) {
  constexpr int kRows = 4;
  int width = a.widths[projection], count = users.Count(piece.adapter);
  const int* tokens = users.Of(piece.adapter);
  int64_t start = a.Start(piece.adapter, projection);
  T* room = Scratch<T>(static_cast<size_t>(kRows) * width);
  Walk<T> walk(a, piece.adapter, start + static_cast<int64_t>(piece.begin) * width, width, width), ahead = walk;
  int far = std::max(RowsAhead<T>(width), kRows);
  for (int i = 0; i < far; ++i) ahead.Step();
  for (int r = piece.begin; r < piece.end; r += kRows) {
    int here = std::min(kRows, piece.end - r);
    const T *rows[kRows], *next[kRows];
    for (int i = 0; i < here; ++i, walk.Step(), ahead.Step()) {
      rows[i] = walk.Find(room + i * width);
      int later = r + far + i;
      next[i] = later < piece.end ? ahead.At() : after.Row(later - piece.end);
    }
    for (int t = 0; t < count;) {
      int together = count - t >= 4 ? 4 : 1;
      const X* own[4];
      for (int i = 0; i < together; ++i) own[i] = x + static_cast<int64_t>(tokens[t + i]) * width;
      float sums[kRows][4];
      auto dots = here == kRows ? (together == 4 ? Dots<T, X, kRows, 4> : Dots<T, X, kRows, 1>)
                                : (together == 4 ? Dots<T, X, 1, 4> : Dots<T, X, 1, 1>);
      for (int i = 0; i < here; i += here == kRows ? kRows : 1) dots(rows + i, next + i, own, width, sums + i);
      for (int i = 0; i < here; ++i) {
        for (int j = 0; j < together; ++j) Narrow(sums[i][j] * scale, m + tokens[t + j] * stride + r + i);
      }
      t += together;
    }
  }
}

// y[t] for the columns of a piece, [T, O] float32; added to what is there when `onto`.
template <typename T, typename M>
void Expand(const Side<T>& b, const Piece& piece, int projection, const Users& users, const M* m, int64_t stride, float* y,
            bool onto, After<T> after) {
  constexpr int kRows = 8, kFewRows = 4, kPair = 2;
  int out = b.widths[projection], width = piece.end - piece.begin, count = users.Count(piece.adapter);
  int most = count < kManyTokens ? kFewRows : kRows;
  int rank = b.RanksOf(piece.adapter)[projection];
  const int* tokens = users.Of(piece.adapter);
  int64_t start = b.Start(piece.adapter, projection) + piece.begin;
  T* room = Scratch<T>(static_cast<size_t>(kRows) * width);
  float* sums = Scratch<float, 1>(static_cast<size_t>(count) * width);
  Walk<T> walk(b, piece.adapter, start, out, width), ahead = walk;
  int far = std::max(RowsAhead<T>(width), most);
  for (int i = 0; i < far; ++i) ahead.Step();
  for (int r = 0; r < rank;) {
    int left = rank - r, here = left >= most ? most : left >= kFewRows ? kFewRows : left >= kPair ? kPair : 1;
    const T *rows[kRows], *next[kRows];
    for (int i = 0; i < here; ++i, walk.Step(), ahead.Step()) {
      rows[i] = walk.Find(room + i * width);
      int later = r + far + i;
      next[i] = later < rank ? ahead.At() : after.Row(later - rank);
    }
    for (int t = 0; t < count;) {
      int together = count - t >= 2 ? 2 : 1;
      const M* f[2];
      float* own[2];
      for (int j = 0; j < together; ++j) {
        own[j] = sums + static_cast<int64_t>(t + j) * width;
        f[j] = m + tokens[t + j] * stride + r;
      }
      auto add = here == kRows      ? (together == 2 ? AddRows<T, M, kRows, 2> : AddRows<T, M, kRows, 1>)
                 : here == kFewRows ? (together == 2 ? AddRows<T, M, kFewRows, 2> : AddRows<T, M, kFewRows, 1>)
                 : here == kPair    ? (together == 2 ? AddRows<T, M, kPair, 2> : AddRows<T, M, kPair, 1>)
                                    : (together == 2 ? AddRows<T, M, 1, 2> : AddRows<T, M, 1, 1>);
      add(rows, next, f, own, width, r == 0);
      t += together;
    }
    r += here;
  }
  for (int t = 0; t < count; ++t) {
    Give<T, M>(sums + static_cast<int64_t>(t) * width, y + static_cast<int64_t>(tokens[t]) * out + piece.begin, width, onto);
  }
}

}  // namespace plora
