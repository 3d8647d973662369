// Adapters in vectors as functions of XLA. Contracts are those of the XLA versions (strategies/low_rank.py); numbers are
// raw bits of bfloat16 or float32. See low_rank.h.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "low_rank.h"
#include "low_rank_operands.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

// One piece for each adapter in use and projection that it changes, whose extent is that of `extent(rank, projection)`.
template <typename Extent, typename Width>
std::vector<Piece> WholePieces(const Users& users, const I32& ranks, Ints group, int max_rank, Extent extent, Width width) {
  int64_t projections = ranks.dimensions()[1];
  std::vector<Piece> pieces;
  for (int e = 0; e < users.Adapters(); ++e) {
    for (int at = 0; users.Count(e) && at < static_cast<int>(group.size()); ++at) {
      int rank = std::min(ranks.typed_data()[e * projections + group[at]], max_rank);
      // Tokens share what is read, so that four cost little more than one.
      int64_t cost = static_cast<int64_t>(rank) * width(group[at]) * ((users.Count(e) + 3) / 4);
      if (rank > 0) pieces.push_back({e, at, 0, extent(rank, group[at]), cost});
    }
  }
  return pieces;
}

template <typename T, typename X, typename M>
struct ShrinkTask {
  const Side<T>& a;
  const Users& users;
  const X* x;
  const F32& scale;
  int64_t layer;
  Ints group;
  int64_t tokens, max_rank;
  M* m;  // [group, tokens, max_rank]

  After<T> First(const Piece& piece) const { return FirstRows(a, piece, group[piece.at]); }
  __attribute__((always_inline)) void Find(const Piece& piece) const { FindRows(a, piece, group[piece.at]); }
  void operator()(const Piece& piece, After<T> after) const {
    auto sizes = scale.dimensions();
    int projection = group[piece.at];
    float factor = scale.typed_data()[(piece.adapter * sizes[1] + layer) * sizes[2] + projection];
    Shrink(a, piece, projection, users, x, factor, m + piece.at * tokens * max_rank, max_rank, after);
  }
};

template <typename T, typename M>
struct ExpandTask {
  const Side<T>& b;
  const Users& users;
  Ints group;
  int64_t tokens, max_rank;
  const M* m;
  const std::vector<float*>& y;  // [tokens, O] by projection of the group
  bool onto;                     // adds to what is in y

  After<T> First(const Piece& piece) const { return FirstColumns(b, piece, group[piece.at]); }
  __attribute__((always_inline)) void Find(const Piece& piece) const { FindColumns(b, piece, group[piece.at]); }
  void operator()(const Piece& piece, After<T> after) const {
    Expand(b, piece, group[piece.at], users, m + piece.at * tokens * max_rank, max_rank, y[piece.at], onto, after);
  }
};

template <typename Task>
void RunPieces(int threads, const std::vector<Piece>& pieces, const Task& task) {
  Parallel(threads, Costs(pieces), [&](int begin, int end) {
    task.Find(pieces[begin]);
    for (int i = begin; i < end; ++i) {
      const Piece& next = pieces[std::min(i + 1, end - 1)];
      task.Find(next);
      task(pieces[i], task.First(next));
    }
  });
}

constexpr int kRowGrain = 4, kColumnGrain = 64;

ffi::Error ShrinkImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                      ffi::Result<Any> out, Ints group, bool int8, Ints a_widths) {
  int64_t tokens = x.dimensions()[0], max_rank = out->dimensions()[2];
  Users users(owner.typed_data(), tokens, ranks.dimensions()[0]);
  std::memset(out->untyped_data(), 0, out->size_bytes());
  auto rows = [](int rank, int) { return rank; };
  auto width = [&](int projection) { return a_widths[projection]; };
  auto pieces = Cut(WholePieces(users, ranks, group, max_rank, rows, width), pool.num_threads(), kRowGrain);
  auto run = [&](auto page_type, auto x_type, auto* m) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x_type)>>;
    using M = std::remove_pointer_t<decltype(m)>;
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths);
    int64_t at = layer.typed_data()[0];
    RunPieces(pool.num_threads(), pieces, ShrinkTask<T, X, M>{a, users, Numbers<X>(x), scale, at, group, tokens, max_rank, m});
  };
  ForAdapterTypes(pages, int8, x, [&](auto page_type, auto x_type) {
    if (out->element_type() == ffi::BF16) {
      run(page_type, x_type, static_cast<uint16_t*>(out->untyped_data()));
    } else {
      run(page_type, x_type, static_cast<uint32_t*>(out->untyped_data()));
    }
  });
  return ffi::Error::Success();
}

ffi::Error ExpandImpl(ffi::ThreadPool pool, Any m, Any pages, I32 layer, I32 owner, I32 ranks, I32 b_pages,
                      ffi::RemainingRets rets, Ints group, bool int8, Ints b_widths) {
  int64_t tokens = m.dimensions()[1], max_rank = m.dimensions()[2];
  Users users(owner.typed_data(), tokens, ranks.dimensions()[0]);
  auto y = Results<float>(rets, owner, ranks, group, max_rank);
  auto width = [&](int projection) { return b_widths[projection]; };
  auto columns = [&](int, int projection) { return b_widths[projection]; };
  auto pieces = Cut(WholePieces(users, ranks, group, max_rank, columns, width), pool.num_threads(), kColumnGrain);
  ForAdapterTypes(pages, int8, m, [&](auto page_type, auto m_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using M = std::remove_const_t<std::remove_pointer_t<decltype(m_type)>>;
    auto b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    RunPieces(pool.num_threads(), pieces, ExpandTask<T, M>{b, users, group, tokens, max_rank, Numbers<M>(m), y, false});
  });
  return ffi::Error::Success();
}

// Shrink and expand of all adapters in use, of tokens whose rows of x begin at `first`; y, [tokens, O] by projection of
// the group, is added to when `onto`.
void RunDelta(int threads, const Any& x, int64_t first, const Any& pages, const I32& layer, const I32& owner,
              const I32& ranks, const F32& scale, const I32& a_pages, const I32& b_pages, const std::vector<float*>& y,
              bool onto, Ints group, bool int8, Ints a_widths, Ints b_widths, int64_t max_rank) {
  int64_t tokens = owner.dimensions()[0];
  Users users(owner.typed_data(), tokens, ranks.dimensions()[0]);
  auto rows = [](int rank, int) { return rank; };
  auto columns = [&](int, int projection) { return b_widths[projection]; };
  auto a_width = [&](int projection) { return a_widths[projection]; };
  auto b_width = [&](int projection) { return b_widths[projection]; };
  auto of_a = WholePieces(users, ranks, group, max_rank, rows, a_width);
  auto of_b = WholePieces(users, ranks, group, max_rank, columns, b_width);
  std::vector<int64_t> costs;
  int64_t total = 0, largest = 0;
  for (size_t i = 0; i < of_a.size(); ++i) {
    costs.push_back(of_a[i].cost + of_b[i].cost);
    total += costs[i], largest = std::max(largest, costs[i]);
  }
  // A task is an adapter's shrink and expand when no thread would wait long for another; else each is cut.
  bool whole = largest * threads <= total || total < kWorthAThread;
  ForAdapterTypes(pages, int8, x, [&](auto page_type, auto x_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x_type)>>;
    std::unique_ptr<X[]> m(new X[group.size() * tokens * max_rank]);
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths), b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    const X* rows = Numbers<X>(x) + first * x.dimensions()[1];
    ShrinkTask<T, X, X> shrink{a, users, rows, scale, layer.typed_data()[0], group, tokens, max_rank, m.get()};
    ExpandTask<T, X> expand{b, users, group, tokens, max_rank, m.get(), y, onto};
    if (whole) {
      Parallel(threads, costs, [&](int begin, int end) {
        // All of an adapter's A before its B: projections of a group lie one after another.
        auto end_of = [&](int i) {
          int stop = i;
          while (stop < end && of_a[stop].adapter == of_a[i].adapter) ++stop;
          return stop;
        };
        auto find = [](const auto& task, const std::vector<Piece>& pieces, int i, int stop) __attribute__((always_inline)) {
          for (; i < stop; ++i) task.Find(pieces[i]);
        };
        for (int i = begin, stop = end_of(i); i < end;) {
          const int next = stop < end ? stop : i, then = stop < end ? end_of(stop) : stop;
          find(expand, of_b, i, stop);
          if (next == stop) find(shrink, of_a, stop, then);
          for (int p = i; p < stop; ++p) shrink(of_a[p], p + 1 < stop ? shrink.First(of_a[p + 1]) : expand.First(of_b[i]));
          for (int p = i; p < stop; ++p) expand(of_b[p], p + 1 < stop ? expand.First(of_b[p + 1]) : shrink.First(of_a[next]));
          i = stop, stop = then;
        }
      });
    } else {
      RunPieces(threads, Cut(of_a, threads, kRowGrain), shrink);
      RunPieces(threads, Cut(of_b, threads, kColumnGrain), expand);
    }
  });
}

ffi::Error DeltaImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                     I32 b_pages, ffi::RemainingRets rets, Ints group, bool int8, Ints a_widths, Ints b_widths, int64_t max_rank) {
  DeltaResults y(rets, owner, ranks, group, max_rank);
  RunDelta(pool.num_threads(), x, 0, pages, layer, owner, ranks, scale, a_pages, b_pages, y.Arrays(), false, group, int8,
           a_widths, b_widths, max_rank);
  y.Finish(pool.num_threads());
  return ffi::Error::Success();
}

ffi::Error AddImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                   I32 b_pages, ffi::RemainingArgs, ffi::RemainingRets sums, Ints group, bool int8, Ints a_widths,
                   Ints b_widths, int64_t max_rank, int64_t first) {
  auto y = RowsFrom(sums, group, first);
  RunDelta(pool.num_threads(), x, first, pages, layer, owner, ranks, scale, a_pages, b_pages, y, true, group, int8, a_widths,
           b_widths, max_rank);
  return ffi::Error::Success();
}

ffi::Error RowsImpl(ffi::ThreadPool pool, Any pages, I32 layer, I32 ranks, I32 tables, I32 chunk, ffi::Result<Any> out,
                    Ints widths, int32_t projection) {
  int64_t adapters = ranks.dimensions()[0], wanted = out->dimensions()[0], width = out->dimensions()[1];
  // Adapter and rank component of each row of the chunk.
  std::vector<std::pair<int, int>> found;
  int64_t skip = chunk.typed_data()[0] * wanted;
  auto room = [&] { return static_cast<int64_t>(found.size()) < wanted; };
  for (int e = 0; e < adapters && room(); ++e) {
    int rank = ranks.typed_data()[e * static_cast<int64_t>(widths.size()) + projection];
    for (int r = std::min<int64_t>(skip, rank); r < rank && room(); ++r) found.push_back({e, r});
    skip = std::max<int64_t>(skip - rank, 0);
  }
  auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    auto side = SideOf<T>(pages, layer, ranks, tables, widths);
    Parallel(pool.num_threads(), std::vector<int64_t>(found.size(), width), [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        int64_t number = side.Start(found[i].first, projection) + found[i].second * width;
        side.Copy(found[i].first, number, width, to + i * width);
      }
    });
    std::memset(to + found.size() * width, 0, (wanted - found.size()) * width * sizeof(T));
  };
  if (pages.element_type() == ffi::U16) {
    run(static_cast<uint16_t*>(out->untyped_data()));
  } else {
    run(static_cast<uint32_t*>(out->untyped_data()));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_shrink, ShrinkImpl, ShrinkOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_expand, ExpandImpl, ExpandOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_delta, DeltaImpl, DeltaOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_add, AddImpl, AddOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_rows, RowsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<Any>()
                                  .Attr<Ints>("widths")
                                  .Attr<int32_t>("projection"));
