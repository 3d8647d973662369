// Adapters on the matrix unit as functions of XLA. See matrix_low_rank.h.

#include "matrix_low_rank.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "low_rank.h"
#include "low_rank_operands.h"
#include "threads.h"

namespace plora {
namespace {

#ifdef __AMX_BF16__

// What a call has, whichever half of the work it does.
struct TileCall {
  TileCall(int threads, const I32& owner, const I32& ranks, Ints group, int64_t max_rank)
      : threads(threads),
        users(owner.typed_data(), owner.dimensions()[0], ranks.dimensions()[0]),
        tiles(users),
        ranks(ranks),
        group(group),
        max_rank(max_rank) {}
  int Rank(int adapter, int at) const {
    return std::min<int64_t>(ranks.typed_data()[adapter * ranks.dimensions()[1] + group[at]], max_rank);
  }
  // Calls f(adapter, place in the group, rank) for what adapters in use change.
  template <typename F>
  void ForProjections(F f) const {
    for (int e = 0; e < users.Adapters(); ++e) {
      for (int at = 0; users.Count(e) && at < static_cast<int>(group.size()); ++at) {
        if (int rank = Rank(e, at); rank > 0) f(e, at, rank);
      }
    }
  }
  // Room for m, of this thread.
  template <typename M>
  Middle<M> MakeMiddle() const {
    const int64_t count = tiles.Size(), stride = TilesOf(max_rank, kTileRanks) * kTileRanks;
    return {AlignedRoom<M, kRoomOfMiddle>(group.size() * count * kTileSide * stride), count, stride};
  }

  const int threads;
  const Users users;
  const TokenTiles tiles;
  const I32& ranks;
  const Ints group;
  const int64_t max_rank;
};

// Cycles are worth so many of the numbers that a cost is counted in, which are read from memory.
constexpr int kNumbersOfCycle = 4;

// Pieces of about equal cost, some for every thread. `cut` pushes those of one with so many parts at least.
template <typename F>
std::vector<TilePiece> CutEvenly(const std::vector<TilePiece>& whole, int threads, F cut) {
  int64_t total = 0;
  for (const TilePiece& piece : whole) total += piece.cost;
  const int64_t most = std::max(kSmallestPiece, total / (kMostRuns * std::max(threads, 1)));
  std::vector<TilePiece> pieces;
  for (const TilePiece& piece : whole) cut(piece, std::max<int64_t>(1, (piece.cost + most / 2) / most), pieces);
  return pieces;
}

// Pieces of 32 ranks, for all token tiles of the adapter or some.
std::vector<TilePiece> ShrinkPieces(const TileCall& call, Ints widths) {
  constexpr int kPackCycles = 80, kProductCycles = 25, kGrain = 4;
  std::vector<TilePiece> whole;
  call.ForProjections([&](int e, int at, int rank) {
    const int first = call.tiles.First(e), last = call.tiles.End(e);
    for (int r = 0; r < rank; r += kTileRanks) {
      const int end = std::min(r + kTileRanks, rank);
      int64_t tiles_of_a = TilesOf(end - r, kTileSide) * (widths[call.group[at]] / kTileInputs);
      whole.push_back({e, at, r, end, first, last,
                       kNumbersOfCycle * tiles_of_a * (kPackCycles + kProductCycles * (last - first))});
    }
  });
  return CutEvenly(whole, call.threads, [](const TilePiece& piece, int64_t parts, std::vector<TilePiece>& pieces) {
    const int tiles = piece.last - piece.first, step = TilesOf(TilesOf(tiles, parts), kGrain) * kGrain;
    for (int first = piece.first; first < piece.last; first += step) {
      const int last = std::min(first + step, piece.last);
      const int64_t cost = piece.cost * (last - first) / tiles;
      pieces.push_back({piece.adapter, piece.at, piece.begin, piece.end, first, last, cost});
    }
  });
}

// Pieces of some columns, of all ranks and for all token tiles of the adapter.
std::vector<TilePiece> ExpandPieces(const TileCall& call, Ints widths) {
  constexpr int kPackCycles = 30, kProductCycles = 16, kStoreCycles = 50, kGrain = 4 * kTileSide;
  constexpr int64_t kMostNumbers = 1 << 18;  // of B: half a megabyte, which stays in the second-level cache
  std::vector<TilePiece> whole;
  call.ForProjections([&](int e, int at, int rank) {
    const int width = widths[call.group[at]], first = call.tiles.First(e), last = call.tiles.End(e);
    const int64_t of_ranks = kPackCycles + kProductCycles * (last - first);
    const int64_t of_column = TilesOf(rank, kTileRanks) * of_ranks + kStoreCycles * (last - first);
    whole.push_back({e, at, 0, width, first, last, kNumbersOfCycle * width / kTileSide * of_column});
  });
  return CutEvenly(whole, call.threads, [&](const TilePiece& piece, int64_t parts, std::vector<TilePiece>& pieces) {
    const int64_t numbers = TilesOf(call.Rank(piece.adapter, piece.at), kTileRanks) * kTileRanks * piece.end;
    parts = std::max(parts, TilesOf(numbers, kMostNumbers));
    const int step = TilesOf(TilesOf(piece.end, parts), kGrain) * kGrain;
    for (int begin = 0; begin < piece.end; begin += step) {
      const int end = std::min(begin + step, piece.end);
      const int64_t cost = piece.cost * (end - begin) / piece.end;
      pieces.push_back({piece.adapter, piece.at, begin, end, piece.first, piece.last, cost});
    }
  });
}

// Calls f(piece, the next one of the thread, whether there is one) over the threads, with the unit set up.
template <typename F>
void RunTilePieces(int threads, const std::vector<TilePiece>& pieces, F f) {
  std::vector<int64_t> costs;
  for (const TilePiece& piece : pieces) costs.push_back(piece.cost);
  Parallel(threads, costs, [&](int begin, int end) {
    Tiles unit;
    for (int i = begin; i < end; ++i) f(pieces[i], pieces[std::min(i + 1, end - 1)], i + 1 < end);
  });
}

// Sixteen rows of x for each tile: where they lie, or copies; rows beyond a tile's tokens are undefined.
std::vector<const uint16_t*> Inputs(const TileCall& call, const uint16_t* x, int64_t width) {
  std::vector<const uint16_t*> inputs;
  std::vector<int> copied;
  for (int tile = 0; tile < call.tiles.Size(); ++tile) {
    const bool whole = call.tiles[tile].Whole();
    inputs.push_back(whole ? x + call.tiles[tile].tokens[0] * width : nullptr);
    if (!whole) copied.push_back(tile);
  }
  uint16_t* room = AlignedRoom<uint16_t, kRoomOfInputs>(copied.size() * kTileSide * width);
  for (size_t i = 0; i < copied.size(); ++i) inputs[copied[i]] = room + i * kTileSide * width;
  Parallel(call.threads, std::vector<int64_t>(copied.size(), kTileSide * width), [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const TokenTiles::Tile& tile = call.tiles[copied[i]];
      for (int row = 0; row < tile.count; ++row) {
        std::memcpy(room + (i * kTileSide + row) * width, x + tile.tokens[row] * width, width * sizeof(uint16_t));
      }
    }
  });
  return inputs;
}

template <typename M, typename T>
Middle<M> RunShrink(const TileCall& call, const Side<T>& a, const Any& x, const F32& scale, int64_t layer,
                    int64_t first = 0) {
  Middle<M> middle = call.MakeMiddle<M>();
  const int64_t width = x.dimensions()[1];
  const auto inputs = Inputs(call, Numbers<uint16_t>(x) + first * width, width);
  const auto sizes = scale.dimensions();
  RunTilePieces(call.threads, ShrinkPieces(call, a.widths), [&](const TilePiece& piece, const TilePiece& then, bool more) {
    const int projection = call.group[piece.at], projection_then = call.group[then.at];
    const int64_t width = a.widths[projection_then];
    NextRows<T> next(a, then.adapter, a.Start(then.adapter, projection_then) + then.begin * width, width, width,
                     more ? then.end - then.begin : 0);
    const float factor = scale.typed_data()[(piece.adapter * sizes[1] + layer) * sizes[2] + projection];
    ShrinkTiles(a, piece, projection, inputs.data(), factor, middle, next);
  });
  return middle;
}

template <bool kOnto, typename T, typename Y>
void RunExpand(const TileCall& call, const Side<T>& b, Middle<uint16_t> middle, const std::vector<Y*>& y) {
  RunTilePieces(call.threads, ExpandPieces(call, b.widths), [&](const TilePiece& piece, const TilePiece& then, bool more) {
    const int projection_then = call.group[then.at];
    NextRows<T> next(b, then.adapter, b.Start(then.adapter, projection_then) + then.begin, b.widths[projection_then],
                     then.end - then.begin, more ? call.Rank(then.adapter, then.at) : 0);
    ExpandTiles<kOnto>(b, piece, call.group[piece.at], call.Rank(piece.adapter, piece.at), call.tiles, middle, y[piece.at], next);
  });
}

// Calls f(row of `middle`, row of [group, tokens, max_rank], rank) for what adapters in use change.
template <typename M, typename N, typename F>
void ForRows(const TileCall& call, Middle<M> middle, N* packed, int64_t tokens, int64_t max_rank, F f) {
  call.ForProjections([&](int e, int at, int rank) {
    for (int tile = call.tiles.First(e); tile < call.tiles.End(e); ++tile) {
      for (int row = 0; row < call.tiles[tile].count; ++row) {
        f(middle.At(at, tile) + row * middle.stride, packed + (at * tokens + call.tiles[tile].tokens[row]) * max_rank, rank);
      }
    }
  });
}

template <typename M, typename T>
void GiveShrunk(const TileCall& call, const Side<T>& a, const Any& x, const F32& scale, int64_t layer, M* out) {
  auto middle = RunShrink<M>(call, a, x, scale, layer);
  ForRows(call, middle, out, x.dimensions()[0], call.max_rank,
          [](const M* from, M* to, int rank) { std::memcpy(to, from, rank * sizeof(M)); });
}

// Calls f with a null pointer of the type of A's and B's numbers in the pages.
template <typename F>
void ForPages(bool int8, F f) {
  int8 ? f(static_cast<const int8_t*>(nullptr)) : f(static_cast<const uint16_t*>(nullptr));
}
template <typename P>
using NumberOf = std::remove_const_t<std::remove_pointer_t<P>>;

#endif  // __AMX_BF16__

ffi::Error TileShrinkImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                          ffi::Result<Any> out, Ints group, bool int8, Ints a_widths) {
#ifdef __AMX_BF16__
  TileCall call(pool.num_threads(), owner, ranks, group, out->dimensions()[2]);
  std::memset(out->untyped_data(), 0, out->size_bytes());
  const int64_t at = layer.typed_data()[0];
  ForPages(int8, [&](auto page_type) {
    auto a = SideOf<NumberOf<decltype(page_type)>>(pages, layer, ranks, a_pages, a_widths);
    if (out->element_type() == ffi::BF16) {
      GiveShrunk(call, a, x, scale, at, static_cast<uint16_t*>(out->untyped_data()));
    } else {
      GiveShrunk(call, a, x, scale, at, static_cast<float*>(out->untyped_data()));
    }
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit");
#endif
}

ffi::Error TileExpandImpl(ffi::ThreadPool pool, Any m, Any pages, I32 layer, I32 owner, I32 ranks, I32 b_pages,
                          ffi::RemainingRets rets, Ints group, bool int8, Ints b_widths) {
#ifdef __AMX_BF16__
  const int64_t tokens = m.dimensions()[1], max_rank = m.dimensions()[2];
  auto y = Results<float>(rets, owner, ranks, group, max_rank);
  TileCall call(pool.num_threads(), owner, ranks, group, max_rank);
  auto middle = call.MakeMiddle<uint16_t>();
  ForRows(call, middle, Numbers<uint16_t>(m), tokens, max_rank, [](uint16_t* to, const uint16_t* from, int rank) {
    std::memcpy(to, from, rank * sizeof(uint16_t));
    std::fill(to + rank, to + TilesOf(rank, kTileRanks) * kTileRanks, 0);
  });
  ForPages(int8, [&](auto page_type) {
    RunExpand<false>(call, SideOf<NumberOf<decltype(page_type)>>(pages, layer, ranks, b_pages, b_widths), middle, y);
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit");
#endif
}

ffi::Error TileDeltaImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                         I32 b_pages, ffi::RemainingRets rets, Ints group, bool int8, Ints a_widths, Ints b_widths,
                         int64_t max_rank) {
#ifdef __AMX_BF16__
  TileCall call(pool.num_threads(), owner, ranks, group, max_rank);
  ForPages(int8, [&](auto page_type) {
    using T = NumberOf<decltype(page_type)>;
    auto middle = RunShrink<uint16_t>(call, SideOf<T>(pages, layer, ranks, a_pages, a_widths), x, scale, layer.typed_data()[0]);
    auto b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    if (rets.get<Any>(0).value()->element_type() == ffi::F32) {
      RunExpand<false>(call, b, middle, Results<float>(rets, owner, ranks, group, max_rank));
    } else {
      RunExpand<false>(call, b, middle, Results<uint16_t>(rets, owner, ranks, group, max_rank));
    }
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit");
#endif
}

ffi::Error TileAddImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                       I32 b_pages, ffi::RemainingArgs, ffi::RemainingRets sums, Ints group, bool int8, Ints a_widths,
                       Ints b_widths, int64_t max_rank, int64_t first) {
#ifdef __AMX_BF16__
  TileCall call(pool.num_threads(), owner, ranks, group, max_rank);
  ForPages(int8, [&](auto page_type) {
    using T = NumberOf<decltype(page_type)>;
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths), b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    auto middle = RunShrink<uint16_t>(call, a, x, scale, layer.typed_data()[0], first);
    RunExpand<true>(call, b, middle, RowsFrom(sums, group, first));
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit");
#endif
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_tile_shrink, TileShrinkImpl, ShrinkOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_tile_expand, TileExpandImpl, ExpandOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_tile_delta, TileDeltaImpl, DeltaOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_tile_add, TileAddImpl, AddOperands());
