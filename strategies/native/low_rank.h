// Shrink and expand over adapters in pages.
//
// m[t] = scale * (x[t] . a[r]) for the rank components r of t's adapter, y[t] = sum over r of m[t][r] * b[r].
// Each component is read once a call however many tokens use it. A token's sums run in the order of its adapter's
// components and of their numbers, so a result depends neither on what else is in the batch nor on how the work is cut.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "threads.h"
#include "vectors.h"

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
};

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
// The first columns of B that a piece of `Expand` reads.
template <typename T>
After<T> FirstColumns(const Side<T>& b, const Piece& piece, int projection) {
  return {b.At(piece.adapter, b.Start(piece.adapter, projection) + piece.begin), b.widths[projection]};
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
template <typename T, int kRows, int kTokens>
void Dots(const T* const* rows, const T* const* next, const float* const* x, int width, float (*sums)[4]) {
  constexpr int kLine = 64 / sizeof(T);
  Vec acc[kRows][kTokens] = {};
  int whole = width / kLanes * kLanes;
  for (int k = 0; k < whole; k += kLanes) {
    Vec v[kTokens];
    for (int t = 0; t < kTokens; ++t) v[t] = Load(x[t] + k);
    for (int r = 0; r < kRows; ++r) {
      if (k % kLine == 0) __builtin_prefetch(next[r] + k, 0, 2);
      Vec a = Load(rows[r] + k);
      for (int t = 0; t < kTokens; ++t) acc[r][t] += a * v[t];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      float sum = Sum(acc[r][t]);
      for (int k = whole; k < width; ++k) sum += Widen(rows[r][k]) * x[t][k];
      sums[r][t] = sum;
    }
  }
}

// y[t][k] += sum over r of f[t][r] * rows[r][k]; from 0 when `first`.
template <typename T, int kRows, int kTokens>
void AddRows(const T* const* rows, const T* const* next, const float (*f)[8], float* const* y, int width, bool first) {
  constexpr int kLine = 64 / sizeof(T);
  int whole = width / kLanes * kLanes;
  for (int k = 0; k < whole; k += kLanes) {
    Vec acc[kTokens];
    for (int t = 0; t < kTokens; ++t) acc[t] = first ? Vec{} : Load(y[t] + k);
    for (int r = 0; r < kRows; ++r) {
      if (k % kLine == 0) __builtin_prefetch(next[r] + k, 0, 2);
      Vec b = Load(rows[r] + k);
      for (int t = 0; t < kTokens; ++t) acc[t] += f[t][r] * b;
    }
    for (int t = 0; t < kTokens; ++t) Store(y[t] + k, acc[t]);
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int k = whole; k < width; ++k) {
      float sum = first ? 0.0f : y[t][k];
      for (int r = 0; r < kRows; ++r) sum += f[t][r] * Widen(rows[r][k]);
      y[t][k] = sum;
    }
  }
}

// m[t][r] for the rows of a piece. x is by token; M is the raw type of m.
template <typename T, typename M>
void Shrink(const Side<T>& a, const Piece& piece, int projection, const Users& users, const float* const* x, float scale,
            M* m, int64_t stride, After<T> after) {
  constexpr int kRows = 4;
  int width = a.widths[projection], count = users.Count(piece.adapter);
  const int* tokens = users.Of(piece.adapter);
  int64_t start = a.Start(piece.adapter, projection);
  std::unique_ptr<T[]> room(new T[static_cast<size_t>(kRows) * width]);
  Walk<T> walk(a, piece.adapter, start + static_cast<int64_t>(piece.begin) * width, width, width);
  for (int r = piece.begin; r < piece.end; r += kRows) {
    int here = std::min(kRows, piece.end - r);
    const T *rows[kRows], *next[kRows];
    for (int i = 0; i < here; ++i, walk.Step()) rows[i] = walk.Find(room.get() + i * width);
    Walk<T> ahead = walk;
    for (int i = 0; i < kRows; ++i, ahead.Step()) {
      int later = r + kRows + i;
      next[i] = later < piece.end ? ahead.At() : after.Row(later - piece.end);
    }
    for (int t = 0; t < count;) {
      int together = count - t >= 4 ? 4 : 1;
      const float* own[4];
      for (int i = 0; i < together; ++i) own[i] = x[tokens[t + i]];
      float sums[kRows][4];
      if (here == kRows) {
        (together == 4 ? Dots<T, kRows, 4> : Dots<T, kRows, 1>)(rows, next, own, width, sums);
      } else {
        auto dots = together == 4 ? Dots<T, 1, 4> : Dots<T, 1, 1>;
        for (int i = 0; i < here; ++i) dots(rows + i, next + i, own, width, sums + i);
      }
      for (int i = 0; i < here; ++i) {
        for (int j = 0; j < together; ++j) Narrow(sums[i][j] * scale, m + tokens[t + j] * stride + r + i);
      }
      t += together;
    }
  }
}

// y[t] for the columns of a piece, [T, O] float32.
template <typename T, typename M>
void Expand(const Side<T>& b, const Piece& piece, int projection, const Users& users, const M* m, int64_t stride, float* y,
            After<T> after) {
  constexpr int kRows = 8;
  int out = b.widths[projection], width = piece.end - piece.begin, count = users.Count(piece.adapter);
  int rank = b.RanksOf(piece.adapter)[projection];
  const int* tokens = users.Of(piece.adapter);
  int64_t start = b.Start(piece.adapter, projection) + piece.begin;
  std::unique_ptr<T[]> room(new T[static_cast<size_t>(kRows) * width]);
  Walk<T> walk(b, piece.adapter, start, out, width);
  for (int r = 0; r < rank;) {
    int here = rank - r >= kRows ? kRows : 1;
    const T *rows[kRows], *next[kRows];
    for (int i = 0; i < here; ++i, walk.Step()) rows[i] = walk.Find(room.get() + i * width);
    Walk<T> ahead = walk;
    for (int i = 0; i < here; ++i, ahead.Step()) {
      int later = r + here + i;
      next[i] = later < rank ? ahead.At() : after.Row(later - rank);
    }
    for (int t = 0; t < count;) {
      int together = count - t >= 2 ? 2 : 1;
      float f[2][8], *own[2];
      for (int j = 0; j < together; ++j) {
        own[j] = y + static_cast<int64_t>(tokens[t + j]) * out + piece.begin;
        for (int i = 0; i < here; ++i) f[j][i] = Widen(m[tokens[t + j] * stride + r + i]);
      }
      auto add = here == kRows ? (together == 2 ? AddRows<T, kRows, 2> : AddRows<T, kRows, 1>)
                               : (together == 2 ? AddRows<T, 1, 2> : AddRows<T, 1, 1>);
      add(rows, next, f, own, width, r == 0);
      t += together;
    }
    r += here;
  }
}

// Rows of x in float32, by token: those of tokens that have an adapter.
class WideRows {
 public:
  WideRows(const uint32_t* x, int width, const Users& users, int tokens) : rows_(tokens) {
    for (int t = 0; t < tokens; ++t) rows_[t] = reinterpret_cast<const float*>(x) + static_cast<int64_t>(t) * width;
  }
  WideRows(const uint16_t* x, int width, const Users& users, int tokens) : rows_(tokens) {
    int used = 0;
    for (int e = 0; e < users.Adapters(); ++e) used += users.Count(e);
    wide_.reset(new float[static_cast<size_t>(used) * width]);
    float* to = wide_.get();
    for (int e = 0; e < users.Adapters(); ++e) {
      for (int i = 0; i < users.Count(e); ++i, to += width) {
        const uint16_t* from = x + static_cast<int64_t>(users.Of(e)[i]) * width;
        for (int k = 0; k < width; ++k) to[k] = Widen(from[k]);
        rows_[users.Of(e)[i]] = to;
      }
    }
  }
  const float* const* data() const { return rows_.data(); }

 private:
  std::vector<const float*> rows_;
  std::unique_ptr<float[]> wide_;
};

}  // namespace plora
