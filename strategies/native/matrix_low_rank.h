// Shrink and expand of bfloat16 tokens over pages of bfloat16 or int8 on the matrix unit (AMX), by the rules of low_rank.h.
//
// An adapter's tokens multiply sixteen at a time, the last of them in a tile that is in part empty. Its rows of A are
// transposed once into tiles of 32 inputs and 16 ranks, its rows of B zipped by pairs of ranks into tiles of 32 ranks and
// 16 columns; all its tokens use them while they are in the second-level cache. A sum runs over inputs, or ranks, in their
// order, whichever tile its token lies in and however many tiles are worked on together, so a token's bits depend on
// nothing beside it. Four tiles of results are worked on at once, so that no product waits for the one before.

#pragma once

#ifdef __AMX_BF16__

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "low_rank.h"
#include "products.h"
#include "vectors.h"

namespace plora {

constexpr int kTileRanks = 2 * kTileSide;  // that a piece of `ShrinkTiles` has at most, and a tile of B

inline int64_t TilesOf(int64_t count, int64_t side) { return (count + side - 1) / side; }

// Room of this thread, for one use, which begins at a cache line; what the call before left there.
template <typename N, int kUse>
N* AlignedRoom(int64_t count) {
  static thread_local std::unique_ptr<Lines<N>> room;
  static thread_local int64_t size = 0;
  if (!room || size < count) room = std::make_unique<Lines<N>>(size = count);
  return room->data();
}
enum { kRoomOfInputs, kRoomOfMiddle, kRoomOfWeights };

// GCC takes the load of a tile to read nothing, and may store later what was written before it.
inline void WrittenToMemory() { asm volatile("" : : : "memory"); }

// The tokens of all adapters in tiles of sixteen, adapter by adapter.
class TokenTiles {
 public:
  struct Tile {
    const int* tokens;
    int count;
    // Whether it is full of neighbours, so that rows are used where they lie.
    bool Whole() const { return count == kTileSide && tokens[kTileSide - 1] - tokens[0] == kTileSide - 1; }
  };
  explicit TokenTiles(const Users& users) : first_(1) {
    for (int e = 0; e < users.Adapters(); ++e) {
      for (int t = 0; t < users.Count(e); t += kTileSide) {
        tiles_.push_back({users.Of(e) + t, std::min(users.Count(e) - t, kTileSide)});
      }
      first_.push_back(tiles_.size());
    }
  }
  int Size() const { return tiles_.size(); }
  int First(int adapter) const { return first_[adapter]; }
  int End(int adapter) const { return first_[adapter + 1]; }
  const Tile& operator[](int tile) const { return tiles_[tile]; }

 private:
  std::vector<Tile> tiles_;
  std::vector<int> first_;
};

// What is between shrink and expand: [group, tiles, 16 tokens, stride], stride a multiple of kTileRanks. Numbers of a row
// are 0 from its adapter's rank up to the next multiple of kTileRanks, and undefined beyond.
template <typename M>
struct Middle {
  M* m;
  int64_t tiles, stride;
  M* At(int at, int tile) const { return m + (at * tiles + tile) * kTileSide * stride; }
};

// What one task does: ranks (of A) or columns (of B) [begin, end) of a projection for the token tiles [first, last).
struct TilePiece {
  int adapter, at, begin, end, first, last;
  int64_t cost;
};

// A row as bfloat16: where it lies, or in `room`. Integers of eight bits are the same numbers in bfloat16.
inline const uint16_t* WideRow(const Walk<uint16_t>& walk, int64_t, uint16_t* room) { return walk.Find(room); }
inline const uint16_t* WideRow(const Walk<int8_t>& walk, int64_t width, uint16_t* room) {
  const int8_t* row = walk.Find(Scratch<int8_t>(width));
  for (int64_t k = 0; k < width; k += kTileSide) Store(room + k, Load(row + k));
  return room;
}

// Rows that the next piece begins with, brought into the cache beside products.
template <typename T>
class NextRows {
 public:
  NextRows(const Side<T>& side, int adapter, int64_t number, int64_t stride, int64_t width, int64_t rows)
      : walk_(side, adapter, number, stride, width), width_(width), left_(rows) {}
  int64_t LinesLeft() const { return left_ * TilesOf(width_, kLine); }
  __attribute__((always_inline)) void Read(int lines) {
    for (; lines > 0 && left_ > 0; --lines) {
      __builtin_prefetch(walk_.At() + at_, 0, 2);
      if ((at_ += kLine) < width_) continue;
      at_ = 0;
      if (--left_) walk_.Step();
    }
  }

 private:
  static constexpr int kLine = 64 / sizeof(T);  // numbers
  Walk<T> walk_;
  int64_t width_, left_, at_ = 0;
};

// Sixteen rows of sixteen pairs as sixteen pairs of sixteen rows.
inline void TransposePairs(const uint16_t* const* rows, int64_t k, uint16_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + k);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: pair 4 lane + j of the rows i to i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xDD);
    __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88), high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xDD);
    _mm512_store_si512(to + (0 + j) * 32, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_store_si512(to + (4 + j) * 32, _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_store_si512(to + (8 + j) * 32, _mm512_shuffle_i32x4(low, low2, 0xDD));
    _mm512_store_si512(to + (12 + j) * 32, _mm512_shuffle_i32x4(high, high2, 0xDD));
  }
}

// The rows of a piece as tiles [I / 32, rank tiles, 16 pairs, 16 ranks]; ranks beyond the last are its copies.
template <typename T>
const uint16_t* PackRanks(const Side<T>& a, const TilePiece& piece, int projection) {
  const int64_t width = a.widths[projection], tiles = TilesOf(piece.end - piece.begin, kTileSide);
  uint16_t* packed = AlignedRoom<uint16_t, kRoomOfWeights>(tiles * kTileSide * width);
  uint16_t* room = Scratch<uint16_t>(kTileSide * width);
  Walk<T> walk(a, piece.adapter, a.Start(piece.adapter, projection) + piece.begin * width, width, width);
  for (int tile = 0; tile < tiles; ++tile) {
    const uint16_t* rows[kTileSide];
    for (int i = 0; i < kTileSide; ++i) {
      const int r = piece.begin + tile * kTileSide + i;
      rows[i] = r < piece.end ? WideRow(walk, width, room + i * width) : rows[i - 1];
      if (r + 1 < piece.end) walk.Step();
    }
    for (int64_t k = 0; k < width; k += kTileInputs) {
      TransposePairs(rows, k, packed + (k / kTileInputs * tiles + tile) * kTileNumbers);
    }
  }
  return packed;
}

// sums [kTokens, kRanks, 16 tokens, 16 ranks]: kTokens tiles of rows of x times kRanks tiles of ranks.
template <int kTokens, int kRanks, typename T>
void ShrinkBlock(const uint16_t* const* x, int64_t width, const uint16_t* packed, NextRows<T>& next, int lines, float* sums) {
  static_assert(kTokens * kRanks <= 4 && kRanks <= 2);
  const int64_t stride = width * sizeof(uint16_t);
  WrittenToMemory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < width; k += kTileInputs, packed += kRanks * kTileNumbers) {
    _tile_loadd(6, packed, 64);
    if constexpr (kRanks == 2) { _tile_loadd(7, packed + kTileNumbers, 64); }
    _tile_loadd(4, x[0] + k, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRanks == 2) { _tile_dpbf16ps(1, 4, 7); }
    if constexpr (kTokens >= 2) {
      _tile_loadd(5, x[1] + k, stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRanks == 2) { _tile_dpbf16ps(3, 5, 7); }
    }
    if constexpr (kTokens == 4) {
      _tile_loadd(4, x[2] + k, stride);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, x[3] + k, stride);
      _tile_dpbf16ps(3, 5, 6);
    }
    next.Read(lines);
  }
  constexpr int kSums = kTileSide * kTileSide;
  _tile_stored(0, sums, 64);
  if constexpr (kRanks == 2) { _tile_stored(1, sums + kSums, 64); }
  if constexpr (kTokens >= 2) { _tile_stored(2, sums + kRanks * kSums, 64); }
  if constexpr (kTokens >= 2 && kRanks == 2) { _tile_stored(3, sums + 3 * kSums, 64); }
  if constexpr (kTokens == 4) {
    _tile_stored(1, sums + 2 * kSums, 64);
    _tile_stored(3, sums + 3 * kSums, 64);
  }
}

// m of a piece. `inputs` are sixteen rows of x for each tile of tokens, one after another.
template <typename T, typename M>
void ShrinkTiles(const Side<T>& a, const TilePiece& piece, int projection, const uint16_t* const* inputs, float scale,
                 Middle<M> middle, NextRows<T> next) {
  const int64_t width = a.widths[projection], ranks = piece.end - piece.begin, rank_tiles = TilesOf(ranks, kTileSide);
  const uint16_t* packed = PackRanks(a, piece, projection);
  const int together = 4 / rank_tiles, tiles = piece.last - piece.first;
  const int lines = TilesOf(next.LinesLeft(), TilesOf(tiles, together) * (width / kTileInputs));
  alignas(64) float sums[4 * kTileSide * kTileSide];
  for (int tile = piece.first; tile < piece.last;) {
    const int left = piece.last - tile, here = left >= together ? together : left >= 2 ? 2 : 1;
    auto block = rank_tiles == 2 ? (here == 2 ? ShrinkBlock<2, 2, T> : ShrinkBlock<1, 2, T>)
                 : here == 4     ? ShrinkBlock<4, 1, T>
                 : here == 2     ? ShrinkBlock<2, 1, T>
                                 : ShrinkBlock<1, 1, T>;
    block(inputs + tile, width, packed, next, lines, sums);
    for (int i = 0; i < here; ++i, ++tile) {
      M* to = middle.At(piece.at, tile) + piece.begin;
      for (int j = 0; j < kTileRanks; j += kTileSide) {
        const __mmask16 real = _bzhi_u32(0xFFFF, std::clamp<int>(ranks - j, 0, kTileSide));
        const float* from = sums + (i * rank_tiles + (j && rank_tiles == 2)) * kTileSide * kTileSide;
        for (int row = 0; row < kTileSide; ++row) {
          __m512 scaled = reinterpret_cast<__m512>(Load(from + row * kTileSide) * scale);
          Store(to + row * middle.stride + j, reinterpret_cast<Vec>(_mm512_maskz_mov_ps(real, scaled)));
        }
      }
    }
  }
}

// The columns of a piece as tiles [columns / 16, rank tiles, 16 pairs, 16 columns], 0 beyond the last rank.
template <typename T>
const uint16_t* PackColumns(const Side<T>& b, const TilePiece& piece, int projection, int rank) {
  const int width = piece.end - piece.begin;
  const int64_t of_column = TilesOf(rank, kTileRanks) * kTileNumbers;
  uint16_t* packed = AlignedRoom<uint16_t, kRoomOfWeights>(TilesOf(width, kTileSide) * of_column);
  uint16_t* room = Scratch<uint16_t>(kTileRanks * width);
  const int64_t stride = b.widths[projection];
  Walk<T> walk(b, piece.adapter, b.Start(piece.adapter, projection) + piece.begin, stride, width);
  // In this order the halves of each 128 bits, zipped, are neighbours.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int r = 0; r < rank; r += kTileRanks) {
    const int here = std::min(kTileRanks, rank - r);
    const uint16_t* rows[kTileRanks];
    for (int i = 0; i < here; ++i) {
      rows[i] = WideRow(walk, width, room + i * width);
      if (r + i + 1 < rank) walk.Step();
    }
    // All rows side by side, so that many lines are on their way from memory at once.
    for (int column = 0; column < width; column += 2 * kTileSide) {
      const bool both = column + kTileSide < width;
      const __mmask32 real = both ? 0xFFFFFFFF : 0xFFFF;
      uint16_t* to = packed + column / kTileSide * of_column + r * kTileSide;
      for (int i = 0; i < kTileRanks; i += 2, to += 2 * kTileSide) {
        __m512i one = _mm512_setzero_si512(), two = one;
        if (i < here) one = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(real, rows[i] + column));
        if (i + 1 < here) two = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(real, rows[i + 1] + column));
        _mm512_store_si512(to, _mm512_unpacklo_epi16(one, two));
        if (both) _mm512_store_si512(to + of_column, _mm512_unpackhi_epi16(one, two));
      }
    }
  }
  return packed;
}

// kColumns tiles of results of a tile of tokens, in rows of `stride` from y on; added to what is there with kOnto.
template <int kColumns, bool kOnto>
void ExpandBlock(const uint16_t* m, int64_t m_stride, const uint16_t* packed, int64_t rank_tiles, float* y, int64_t stride) {
  const int64_t of_column = rank_tiles * kTileNumbers;
  WrittenToMemory();
  if constexpr (kOnto) {
    _tile_loadd(0, y, stride * 4);
    if constexpr (kColumns > 1) { _tile_loadd(1, y + kTileSide, stride * 4); }
    if constexpr (kColumns > 2) { _tile_loadd(2, y + 2 * kTileSide, stride * 4); }
    if constexpr (kColumns > 3) { _tile_loadd(3, y + 3 * kTileSide, stride * 4); }
  } else {
    _tile_zero(0);
    if constexpr (kColumns > 1) { _tile_zero(1); }
    if constexpr (kColumns > 2) { _tile_zero(2); }
    if constexpr (kColumns > 3) { _tile_zero(3); }
  }
  for (int64_t k = 0; k < rank_tiles; ++k, packed += kTileNumbers) {
    _tile_loadd(4, m + k * kTileRanks, m_stride * 2);
    _tile_loadd(5, packed, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kColumns > 1) {
      _tile_loadd(6, packed + of_column, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kColumns > 2) {
      _tile_loadd(7, packed + 2 * of_column, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kColumns > 3) {
      _tile_loadd(5, packed + 3 * of_column, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, y, stride * 4);
  if constexpr (kColumns > 1) { _tile_stored(1, y + kTileSide, stride * 4); }
  if constexpr (kColumns > 2) { _tile_stored(2, y + 2 * kTileSide, stride * 4); }
  if constexpr (kColumns > 3) { _tile_stored(3, y + 3 * kTileSide, stride * 4); }
}

// y [T, O] of a piece; added to what is there with kOnto. Raw bfloat16 is rounded from sums in float32.
template <bool kOnto, typename T, typename Y>
void ExpandTiles(const Side<T>& b, const TilePiece& piece, int projection, int rank, const TokenTiles& tiles,
                 Middle<uint16_t> middle, Y* y, NextRows<T> next) {
  constexpr int kMost = 4;
  constexpr bool kWide = sizeof(Y) == sizeof(float);
  static_assert(kWide || !kOnto);
  const int64_t out = b.widths[projection], rank_tiles = TilesOf(rank, kTileRanks);
  const uint16_t* packed = PackColumns(b, piece, projection, rank);
  const int columns = TilesOf(piece.end - piece.begin, kTileSide);
  const int lines = TilesOf(next.LinesLeft(), (piece.last - piece.first) * TilesOf(columns, kMost));
  alignas(64) float room[kTileSide * kMost * kTileSide];
  for (int tile = piece.first; tile < piece.last; ++tile) {
    const TokenTiles::Tile& tokens = tiles[tile];
    const bool in_place = kWide && tokens.Whole();
    for (int column = 0; column < columns; column += kMost) {
      const int here = std::min(kMost, columns - column);
      auto block = here == 4   ? ExpandBlock<4, kOnto>
                   : here == 3 ? ExpandBlock<3, kOnto>
                   : here == 2 ? ExpandBlock<2, kOnto>
                               : ExpandBlock<1, kOnto>;
      Y* rows = y + piece.begin + column * kTileSide;
      const size_t bytes = here * kTileSide * sizeof(float);
      for (int row = 0; kOnto && !in_place && row < tokens.count; ++row) {
        std::memcpy(room + row * kMost * kTileSide, rows + tokens.tokens[row] * out, bytes);
      }
      float* sums = room;
      int64_t stride = kMost * kTileSide;
      if constexpr (kWide) {
        if (in_place) sums = rows + tokens.tokens[0] * out, stride = out;
      }
      block(middle.At(piece.at, tile), middle.stride, packed + column * rank_tiles * kTileNumbers, rank_tiles, sums, stride);
      for (int row = 0; !in_place && row < tokens.count; ++row) {
        const float* from = room + row * kMost * kTileSide;
        Y* to = rows + tokens.tokens[row] * out;
        for (int i = 0; i < here * kTileSide; i += kTileSide) Store(to + i, Load(from + i));
      }
      next.Read(lines);
    }
  }
}

}  // namespace plora

#endif  // __AMX_BF16__
