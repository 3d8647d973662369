// Attention of bfloat16 queries over bfloat16 pages on the matrix unit (AMX), by the rules of attention.h.
//
// Keys multiply as they lie in a page: sixteen of them are the rows of a tile, and queries, packed once, its columns.
// Values are zipped by pairs of tokens, once for all rows of a head. A row's sums depend on nothing beside it.

#pragma once

#ifdef __AMX_BF16__

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "products.h"

namespace plora {

// Numbers that are read ahead beside a product of tiles.
constexpr int kBeside = 8 * kTileInputs;

// Whether rows of that size, `count` a head, are worked on here: few are done sooner in vectors, which reading hides.
inline bool AttendsOnMatrixUnit(int64_t count, int64_t dim, int page_tokens) {
  return count > kTileRows && dim % kTileInputs == 0 && page_tokens % kTileSide == 0 && MatrixUnit();
}

// Rows that share tiles: all of a small head, in fours; sixteen of a large one.
inline int RowsOfTiles(int64_t count) { return static_cast<int>(std::min<int64_t>((count + 3) / 4 * 4, kTileSide)); }

// Sets the unit up for attention; for the life of an object, on the thread that made it.
class AttentionTiles {
 public:
  explicit AttentionTiles(int rows) {
    struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    auto shape = [&](int tile, int tile_rows, int columns) {
      config.rows[tile] = tile_rows, config.row_bytes[tile] = 4 * columns;
    };
    shape(0, kTileSide, rows), shape(1, kTileSide, rows);  // scores of 16 keys
    shape(2, kTileSide, rows);  // queries
    shape(3, kTileSide, kTileSide);  // keys
    shape(4, rows, kTileSide);  // weights of 32 tokens
    shape(5, kTileSide, kTileSide);  // values of 32 tokens
    shape(6, rows, kTileSide), shape(7, rows, kTileSide);  // out
    // GCC takes the instruction to read 8 bytes, and may not store the rest.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~AttentionTiles() { _tile_release(); }
};

// The rows of one group and KV head, in tiles of `per_tile` rows of which the last may be in part empty.
class TileRows {
 public:
  // q: [count, dim].
  TileRows(const uint16_t* q, int count, int dim, std::vector<int64_t> positions)
      : count(count),
        dim(dim),
        per_tile(RowsOfTiles(count)),
        tiles((count + per_tile - 1) / per_tile),
        positions(std::move(positions)),
        top(count, kMasked),
        sum(count, Vec{}),
        out(static_cast<int64_t>(tiles) * per_tile * dim),
        queries_(static_cast<int64_t>(tiles) * per_tile * dim / 2) {
    for (int row = 0; row < count; ++row) {
      for (int pair = 0; pair < dim / 2; ++pair) {
        uint32_t* to = queries_.data() + (static_cast<int64_t>(row / per_tile) * (dim / 2) + pair) * per_tile;
        std::memcpy(to + row % per_tile, q + static_cast<int64_t>(row) * dim + 2 * pair, 4);
      }
    }
  }
  // Pairs of numbers of a tile's queries from `j` on: [16, per_tile].
  const uint32_t* Queries(int tile, int j) {
    return queries_.data() + (static_cast<int64_t>(tile) * (dim / 2) + j / 2) * per_tile;
  }
  float* Out(int tile) { return out.data() + static_cast<int64_t>(tile) * per_tile * dim; }

  // Writes the results to place `at` of those of all groups and heads.
  void Give(float* outs, float* tops, float* sums, int64_t at) {
    for (int row = 0; row < count; ++row) {
      const float* from = out.data() + static_cast<int64_t>(row) * dim;
      float* to = outs + (at * count + row) * dim;
      for (int j = 0; j < dim; j += 2 * kLanes) {
        Vec low, high;
        Unzip(Load(from + j), Load(from + j + kLanes), &low, &high);
        Store(to + j, low), Store(to + j + kLanes, high);
      }
      tops[at * count + row] = top[row];
      sums[at * count + row] = Sum(sum[row]);
    }
  }

  const int count, dim, per_tile, tiles;
  const std::vector<int64_t> positions;
  std::vector<float> top;
  std::vector<Vec> sum;
  Lines<float> out;  // as `Zip` leaves it

 private:
  Lines<uint32_t> queries_;
};

// Room for a chunk.
struct TileRoom {
  TileRoom(int rows, int dim, int page_tokens)
      : stride((kChunkPages * page_tokens + kTileInputs - 1) / kTileInputs * kTileInputs),
        by_key(stride * rows),
        scores(stride * rows),
        weights(stride * rows),
        values(stride / 2 * dim) {}
  const int stride;  // tokens
  Lines<float> by_key, scores;  // [tokens, rows], [rows, tokens]
  Lines<uint16_t> weights;      // [rows, tokens]
  Lines<uint32_t> values;       // [tokens / 2, dim], as `Zip` leaves them
};

// Scores of sixteen keys [16, stride] of four rows, as [4, to_stride].
inline void TransposeFour(const float* from, int stride, float* to, int to_stride) {
  Vec keys[4];
  for (int i = 0; i < 4; ++i) {
    const float* at = from + 4 * i * stride;
    if (stride == 4) {
      keys[i] = Load(at);
    } else {
      __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(at));
      four = _mm512_insertf32x4(four, _mm_loadu_ps(at + stride), 1);
      four = _mm512_insertf32x4(four, _mm_loadu_ps(at + 2 * stride), 2);
      keys[i] = reinterpret_cast<Vec>(_mm512_insertf32x4(four, _mm_loadu_ps(at + 3 * stride), 3));
    }
  }
  Vec first[2], second[2];  // rows 0 and 1, rows 2 and 3, of eight keys
  for (int i = 0; i < 2; ++i) {
    Vec a = keys[2 * i], b = keys[2 * i + 1];
    first[i] = __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    second[i] = __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  }
  auto store = [&](int row, Vec a, Vec b, auto halves) __attribute__((always_inline)) {
    constexpr bool kHigh = decltype(halves)::value;
    Store(to + row * to_stride,
          kHigh ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
                : __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
  };
  store(0, first[0], first[1], std::false_type{});
  store(1, first[0], first[1], std::true_type{});
  store(2, second[0], second[1], std::false_type{});
  store(3, second[0], second[1], std::true_type{});
}

// Zips the values [begin, end) of a chunk, with zeros for the others.
template <typename S>
inline void ZipValues(const Chunk<uint16_t, S>& chunk, int page_tokens, int dim, Visible any, Ahead<uint16_t>& next,
                      TileRoom& room) {
  const int first = any.begin / kTileInputs * kTileInputs;
  const int last = (any.end + kTileInputs - 1) / kTileInputs * kTileInputs;
  for (int s = first; s < last; s += 2) {
    const int page = s / page_tokens, in_page = s % page_tokens;
    const uint16_t* at = chunk.keys[std::min(page, chunk.pages - 1)] + chunk.value_offset + in_page * dim;
    next.Read(3 * dim / 2);
    const bool one = s >= any.begin && s < any.end, two = s + 1 >= any.begin && s + 1 < any.end;
    uint32_t* to = room.values.data() + s / 2 * dim;
    for (int j = 0; j < dim; j += 2 * kLanes) {
      Half32 zipped[2];
      Zip(one ? LoadPairs(at + j) : Half32{}, two ? LoadPairs(at + dim + j) : Half32{}, &zipped[0], &zipped[1]);
      Store(to + j, reinterpret_cast<Vec>(zipped[0]));
      Store(to + j + kLanes, reinterpret_cast<Vec>(zipped[1]));
    }
  }
}

// Scores of a tile's rows with the keys [first, last) x 16 of a chunk.
template <typename S>
inline void ScoreTile(TileRows& rows, int tile, const Chunk<uint16_t, S>& chunk, int page_tokens, int first, int last,
                      Ahead<uint16_t>& next, TileRoom& room) {
  const int dim = rows.dim, per_tile = rows.per_tile, of_page = page_tokens / kTileSide;
  auto keys = [&](const Chunk<uint16_t, S>& of, int at) {
    return of.keys[at / of_page] + at % of_page * (kTileSide * dim);
  };
  for (int at = first; at < last; at += 2) {
    const bool two = at + 1 < last;
    _tile_zero(0);
    _tile_zero(1);
    for (int j = 0; j < dim; j += kTileInputs) {
      _tile_loadd(2, rows.Queries(tile, j), per_tile * 4);
      _tile_loadd(3, keys(chunk, at) + j, dim * 2);
      next.Read(kBeside);
      _tile_dpbf16ps(0, 3, 2);
      if (two) {
        _tile_loadd(3, keys(chunk, at + 1) + j, dim * 2);
        _tile_dpbf16ps(1, 3, 2);
        next.Read(kBeside);
      }
    }
    float* to = room.by_key.data() + at * kTileSide * per_tile;
    _tile_stored(0, to, per_tile * 4);
    if (two) { _tile_stored(1, to + kTileSide * per_tile, per_tile * 4); }
  }
  for (int at = first; at < last; ++at) {
    for (int row = 0; row < per_tile; row += 4) {
      TransposeFour(room.by_key.data() + at * kTileSide * per_tile + row, per_tile,
                    room.scores.data() + row * room.stride + at * kTileSide, room.stride);
    }
    next.Read(4 * dim);
  }
}

// out[r] = out[r] * decay[r] + weights[r] . values over the tokens [first, last) x 32 of a chunk.
inline void AddTile(TileRows& rows, int tile, int first, int last, const float* decay, Ahead<uint16_t>& next,
                    TileRoom& room) {
  const int dim = rows.dim;
  float* out = rows.Out(tile);
  for (int r = 0; r < rows.per_tile; ++r) {
    if (decay[r] == 1.0f) continue;
    for (int j = 0; j < dim; j += kLanes) Store(out + r * dim + j, Load(out + r * dim + j) * decay[r]);
  }
  for (int j = 0; j < dim; j += 2 * kTileSide) {
    _tile_loadd(6, out + j, dim * 4);
    _tile_loadd(7, out + j + kTileSide, dim * 4);
    for (int at = first; at < last; ++at) {
      const uint32_t* values = room.values.data() + at * kTileSide * dim + j;
      _tile_loadd(4, room.weights.data() + at * kTileInputs, room.stride * 2);
      _tile_loadd(5, values, dim * 4);
      _tile_dpbf16ps(6, 4, 5);
      next.Read(kBeside);
      _tile_loadd(5, values + kTileSide, dim * 4);
      _tile_dpbf16ps(7, 4, 5);
      next.Read(kBeside);
    }
    _tile_stored(6, out + j, dim * 4);
    _tile_stored(7, out + j + kTileSide, dim * 4);
  }
}

// Weights of the rows [row, row + kRows) of a tile, 0 up to where a tile of tokens ends.
template <int kRows, typename S>
inline void WeighRows(TileRows& rows, int tile, int row, int tokens, const Visible* seen, const ScoreMaths& maths,
                      const S& scales, float* decay, TileRoom& room) {
  const int at = tile * rows.per_tile + row;
  Weigh<uint16_t, kRows>(room.scores.data() + row * room.stride, room.weights.data() + row * room.stride, room.stride,
                         tokens, seen + row, maths, scales, rows.top.data() + at, rows.sum.data() + at, decay + row);
  for (int s = tokens; s % kTileInputs; s += kLanes) {
    for (int r = row; r < row + kRows; ++r) Store(room.weights.data() + r * room.stride + s, Vec{});
  }
}

// All rows of a head over one chunk, whose first token is `first`; what is in `next` is read meanwhile.
template <typename S>
inline void AttendChunk(TileRows& rows, const Chunk<uint16_t, S>& chunk, int64_t first, int page_tokens,
                        const ScoreMaths& maths, Ahead<uint16_t>& next, TileRoom& room) {
  const int tokens = chunk.pages * page_tokens;
  Visible all = {tokens, 0};
  for (int r = 0; r < rows.count; ++r) {
    Visible seen = VisibleIn(rows.positions[r], maths.window, first, tokens);
    if (!seen.Empty()) all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
  }
  if (all.Empty()) return;
  bool zipped = false;
  for (int tile = 0; tile < rows.tiles; ++tile) {
    Visible seen[kTileSide] = {}, any = {tokens, 0};
    const int from = tile * rows.per_tile, here = std::min(rows.per_tile, rows.count - from);
    for (int r = 0; r < here; ++r) {
      seen[r] = VisibleIn(rows.positions[from + r], maths.window, first, tokens);
      if (!seen[r].Empty()) any = {std::min(any.begin, seen[r].begin), std::max(any.end, seen[r].end)};
    }
    if (any.Empty()) continue;
    ScoreTile(rows, tile, chunk, page_tokens, any.begin / kTileSide, (any.end + kTileSide - 1) / kTileSide, next, room);
    if (!zipped) ZipValues(chunk, page_tokens, rows.dim, all, next, room);
    zipped = true;
    float decay[kTileSide];
    std::fill_n(decay, kTileSide, 1.0f);
    for (int r = 0; r < here; r += 4) {
      auto weigh = WeighRows<4, S>;
      switch (here - r) {
        case 1: weigh = WeighRows<1, S>; break;
        case 2: weigh = WeighRows<2, S>; break;
        case 3: weigh = WeighRows<3, S>; break;
      }
      weigh(rows, tile, r, tokens, seen, maths, chunk.scales, decay, room);
    }
    AddTile(rows, tile, any.begin / kTileInputs, (any.end + kTileInputs - 1) / kTileInputs, decay, next, room);
  }
}

}  // namespace plora

#endif  // __AMX_BF16__
