// CPU kernels for what XLA does far from the machine's limit, called through jax.ffi. Contracts are those of the XLA
// versions (strategies/low_rank.py, strategies/paged_attention.py); numbers are raw bits of bfloat16 or float32.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "low_rank.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using Any = ffi::AnyBuffer;

template <typename T>
const T* Numbers(const Any& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Calls f with a null pointer of the type of each buffer's raw numbers.
template <typename F>
void ForTypes(const Any& pages, const Any& x, F f) {
  bool half = pages.element_type() == ffi::U16, half_x = x.element_type() == ffi::U16;
  const uint16_t* h = nullptr;
  const uint32_t* w = nullptr;
  half ? (half_x ? f(h, h) : f(h, w)) : (half_x ? f(w, h) : f(w, w));
}

template <typename T>
Side<T> SideOf(const Any& pages, const I32& layer, const I32& ranks, const I32& tables, Ints widths) {
  auto sizes = pages.dimensions();
  const T* first = Numbers<T>(pages) + layer.typed_data()[0] * sizes[1] * sizes[2];
  return {first, sizes[2], tables.typed_data(), tables.dimensions()[1], ranks.typed_data(), widths};
}

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

template <typename T, typename M>
struct ShrinkTask {
  const Side<T>& a;
  const Users& users;
  const float* const* x;
  const F32& scale;
  int64_t layer;
  Ints group;
  int64_t tokens, max_rank;
  M* m;  // [group, tokens, max_rank]

  After<T> First(const Piece& piece) const { return FirstRows(a, piece, group[piece.at]); }
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

  After<T> First(const Piece& piece) const { return FirstColumns(b, piece, group[piece.at]); }
  void operator()(const Piece& piece, After<T> after) const {
    Expand(b, piece, group[piece.at], users, m + piece.at * tokens * max_rank, max_rank, y[piece.at], after);
  }
};

template <typename Task>
void RunPieces(ffi::ThreadPool& pool, const std::vector<Piece>& pieces, const Task& task) {
  int last = pieces.size() - 1;
  Parallel(pool, Costs(pieces), [&, last](int i) { task(pieces[i], task.First(pieces[std::min(i + 1, last)])); });
}

// The results' arrays, with zeros where no piece will write.
std::vector<float*> Results(ffi::RemainingRets& rets, const I32& owner, const I32& ranks, Ints group, int max_rank) {
  int64_t adapters = ranks.dimensions()[0], projections = ranks.dimensions()[1];
  std::vector<float*> y;
  for (size_t at = 0; at < group.size(); ++at) {
    auto result = rets.get<F32>(at).value();
    int64_t tokens = result->dimensions()[0], width = result->dimensions()[1];
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t who = owner.typed_data()[t];
      bool used = who >= 0 && who < adapters && ranks.typed_data()[who * projections + group[at]] > 0 && max_rank > 0;
      if (!used) std::memset(result->typed_data() + t * width, 0, width * sizeof(float));
    }
    y.push_back(result->typed_data());
  }
  return y;
}

constexpr int kRowGrain = 4, kColumnGrain = 64;

ffi::Error ShrinkImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                      ffi::Result<Any> out, Ints group, Ints a_widths) {
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
    WideRows wide(Numbers<X>(x), x.dimensions()[1], users, tokens);
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths);
    int64_t at = layer.typed_data()[0];
    RunPieces(pool, pieces, ShrinkTask<T, M>{a, users, wide.data(), scale, at, group, tokens, max_rank, m});
  };
  ForTypes(pages, x, [&](auto page_type, auto x_type) {
    if (out->element_type() == ffi::U16) {
      run(page_type, x_type, static_cast<uint16_t*>(out->untyped_data()));
    } else {
      run(page_type, x_type, static_cast<uint32_t*>(out->untyped_data()));
    }
  });
  return ffi::Error::Success();
}

ffi::Error ExpandImpl(ffi::ThreadPool pool, Any m, Any pages, I32 layer, I32 owner, I32 ranks, I32 b_pages,
                      ffi::RemainingRets rets, Ints group, Ints b_widths) {
  int64_t tokens = m.dimensions()[1], max_rank = m.dimensions()[2];
  Users users(owner.typed_data(), tokens, ranks.dimensions()[0]);
  auto y = Results(rets, owner, ranks, group, max_rank);
  auto width = [&](int projection) { return b_widths[projection]; };
  auto columns = [&](int, int projection) { return b_widths[projection]; };
  auto pieces = Cut(WholePieces(users, ranks, group, max_rank, columns, width), pool.num_threads(), kColumnGrain);
  ForTypes(pages, m, [&](auto page_type, auto m_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using M = std::remove_const_t<std::remove_pointer_t<decltype(m_type)>>;
    auto b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    RunPieces(pool, pieces, ExpandTask<T, M>{b, users, group, tokens, max_rank, Numbers<M>(m), y});
  });
  return ffi::Error::Success();
}

ffi::Error DeltaImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                     I32 b_pages, ffi::RemainingRets rets, Ints group, Ints a_widths, Ints b_widths, int64_t max_rank) {
  int64_t tokens = x.dimensions()[0];
  Users users(owner.typed_data(), tokens, ranks.dimensions()[0]);
  auto y = Results(rets, owner, ranks, group, max_rank);
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
  bool whole = largest * pool.num_threads() <= total || total < kWorthAThread;
  ForTypes(pages, x, [&](auto page_type, auto x_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x_type)>>;
    WideRows wide(Numbers<X>(x), x.dimensions()[1], users, tokens);
    std::unique_ptr<X[]> m(new X[group.size() * tokens * max_rank]);
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths), b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    ShrinkTask<T, X> shrink{a, users, wide.data(), scale, layer.typed_data()[0], group, tokens, max_rank, m.get()};
    ExpandTask<T, X> expand{b, users, group, tokens, max_rank, m.get(), y};
    if (whole) {
      int last = costs.size() - 1;
      Parallel(pool, costs, [&](int i) {
        shrink(of_a[i], expand.First(of_b[i]));
        expand(of_b[i], shrink.First(of_a[std::min(i + 1, last)]));
      });
    } else {
      RunPieces(pool, Cut(of_a, pool.num_threads(), kRowGrain), shrink);
      RunPieces(pool, Cut(of_b, pool.num_threads(), kColumnGrain), expand);
    }
  });
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
    Parallel(pool, std::vector<int64_t>(found.size(), width), [&](int i) {
      int64_t number = side.Start(found[i].first, projection) + found[i].second * width;
      side.Copy(found[i].first, number, width, to + i * width);
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

// Tokens that the queries of a group see, [from, to).
std::pair<int64_t, int64_t> SeenTokens(const int32_t* positions, int64_t queries, int64_t window) {
  int64_t first = INT32_MAX, last = -1;
  for (int64_t i = 0; i < queries; ++i) {
    int64_t position = positions[i];
    if (position >= 0) first = std::min(first, position), last = std::max(last, position);
  }
  if (last < 0) return {0, 0};
  return {std::max<int64_t>(first - window + 1, 0), last + 1};
}

// Results and queries of one group and KV head while they are worked on: heads padded to whole vectors.
struct HeadRows {
  std::vector<float> q, out;
  std::vector<int64_t> positions;
  std::vector<Vec> sums;
};

ffi::Error AttentionImpl(ffi::ThreadPool pool, Any q, Any pages, I32 layer, I32 tables, I32 positions, I32 window,
                         ffi::Result<F32> out, ffi::Result<F32> top, ffi::Result<F32> sum, float scale, float cap,
                         int32_t page_tokens) {
  int64_t groups = q.dimensions()[0], heads = q.dimensions()[1], count = q.dimensions()[2], dim = q.dimensions()[3];
  int64_t queries = positions.dimensions()[1], padded = (dim + kLanes - 1) / kLanes * kLanes;
  ScoreMaths maths{cap, window.typed_data()[0]};
  std::fill_n(top->typed_data(), groups * heads * count, kMasked);
  // Few rows are bound by memory, which likes all heads of a page together, unless that leaves threads without work.
  bool together = count <= 2 * kTileRows && groups >= 4 * static_cast<int64_t>(pool.num_threads());
  int64_t heads_of_task = together ? heads : 1, tasks_of_group = heads / heads_of_task;
  std::vector<std::pair<int64_t, int64_t>> seen(groups);
  std::vector<int64_t> costs(groups * tasks_of_group);
  for (int64_t n = 0; n < groups; ++n) {
    seen[n] = SeenTokens(positions.typed_data() + n * queries, queries, maths.window);
    int64_t of_head = (seen[n].second - seen[n].first) * 2 * dim * ((count + kTileRows - 1) / kTileRows);
    std::fill_n(costs.begin() + n * tasks_of_group, tasks_of_group, of_head * heads_of_task);
  }
  ForTypes(pages, q, [&](auto page_type, auto q_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using Q = std::remove_const_t<std::remove_pointer_t<decltype(q_type)>>;
    auto sizes = pages.dimensions();
    const T* of_layer = Numbers<T>(pages) + layer.typed_data()[0] * sizes[1] * sizes[2];
    int64_t table_pages = tables.dimensions()[1];
    Parallel(pool, costs, [&](int task) {
      int64_t n = task / tasks_of_group, head = task % tasks_of_group;
      std::vector<HeadRows> own(heads_of_task);
      std::vector<Rows> rows;
      for (int64_t i = 0; i < heads_of_task; ++i) {
        int64_t first = (n * heads + head + i) * count;
        HeadRows& h = own[i];
        h.q.resize(count * padded), h.out.resize(count * padded), h.positions.resize(count), h.sums.resize(count, Vec{});
        for (int64_t r = 0; r < count; ++r) {
          h.positions[r] = positions.typed_data()[n * queries + r / (count / queries)];
          const Q* from = Numbers<Q>(q) + (first + r) * dim;
          for (int64_t j = 0; j < dim; ++j) h.q[r * padded + j] = Widen(from[j]) * scale;
        }
        rows.push_back({h.q.data(), h.positions.data(), static_cast<int>(count), static_cast<int>(padded), h.out.data(),
                        top->typed_data() + first, h.sums.data()});
      }
      KvPages<T> kv{of_layer, sizes[2], page_tokens * dim, heads * page_tokens * dim, page_tokens, static_cast<int>(dim),
                    tables.typed_data() + n * table_pages, table_pages};
      Attend(rows, kv, head, seen[n].first / page_tokens, (seen[n].second + page_tokens - 1) / page_tokens, maths);
      for (int64_t i = 0; i < heads_of_task; ++i) {
        int64_t first = (n * heads + head + i) * count;
        for (int64_t r = 0; r < count; ++r) {
          sum->typed_data()[first + r] = Sum(own[i].sums[r]);
          std::memcpy(out->typed_data() + (first + r) * dim, &own[i].out[r * padded], dim * sizeof(float));
        }
      }
    });
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_shrink, ShrinkImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Ret<Any>()
                                  .Attr<Ints>("group")
                                  .Attr<Ints>("a_widths"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_expand, ExpandImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .RemainingRets()
                                  .Attr<Ints>("group")
                                  .Attr<Ints>("b_widths"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_delta, DeltaImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .RemainingRets()
                                  .Attr<Ints>("group")
                                  .Attr<Ints>("a_widths")
                                  .Attr<Ints>("b_widths")
                                  .Attr<int64_t>("max_rank"));

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_partial_attention, AttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<int32_t>("page_tokens"));
