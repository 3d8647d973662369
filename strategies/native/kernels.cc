// CPU kernels for what XLA does far from the machine's limit, called through jax.ffi. Contracts are those of the XLA
// versions (strategies/low_rank.py, strategies/paged_attention.py); numbers are raw bits of bfloat16 or float32.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "low_rank.h"
#include "low_rank_operands.h"
#include "matrix_attention.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

// Calls f with a null pointer of the type of each buffer's raw numbers.
template <typename F>
void ForTypes(const Any& pages, const Any& x, F f) {
  bool half = pages.element_type() == ffi::U16, half_x = x.element_type() == ffi::BF16;
  const uint16_t* h = nullptr;
  const uint32_t* w = nullptr;
  half ? (half_x ? f(h, h) : f(h, w)) : (half_x ? f(w, h) : f(w, w));
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
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths);
    int64_t at = layer.typed_data()[0];
    RunPieces(pool.num_threads(), pieces, ShrinkTask<T, X, M>{a, users, Numbers<X>(x), scale, at, group, tokens, max_rank, m});
  };
  ForTypes(pages, x, [&](auto page_type, auto x_type) {
    if (out->element_type() == ffi::BF16) {
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
    RunPieces(pool.num_threads(), pieces, ExpandTask<T, M>{b, users, group, tokens, max_rank, Numbers<M>(m), y, false});
  });
  return ffi::Error::Success();
}

// Shrink and expand of all adapters in use; y, [tokens, O] by projection of the group, is added to when `onto`.
void RunDelta(int threads, const Any& x, const Any& pages, const I32& layer, const I32& owner, const I32& ranks,
              const F32& scale, const I32& a_pages, const I32& b_pages, const std::vector<float*>& y, bool onto, Ints group,
              Ints a_widths, Ints b_widths, int64_t max_rank) {
  int64_t tokens = x.dimensions()[0];
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
  ForTypes(pages, x, [&](auto page_type, auto x_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using X = std::remove_const_t<std::remove_pointer_t<decltype(x_type)>>;
    std::unique_ptr<X[]> m(new X[group.size() * tokens * max_rank]);
    auto a = SideOf<T>(pages, layer, ranks, a_pages, a_widths), b = SideOf<T>(pages, layer, ranks, b_pages, b_widths);
    ShrinkTask<T, X, X> shrink{a, users, Numbers<X>(x), scale, layer.typed_data()[0], group, tokens, max_rank, m.get()};
    ExpandTask<T, X> expand{b, users, group, tokens, max_rank, m.get(), y, onto};
    if (whole) {
      Parallel(threads, costs, [&](int begin, int end) {
        shrink.Find(of_a[begin]);
        for (int i = begin; i < end; ++i) {
          const Piece& next = of_a[std::min(i + 1, end - 1)];
          expand.Find(of_b[i]);
          shrink.Find(next);
          shrink(of_a[i], expand.First(of_b[i]));
          expand(of_b[i], shrink.First(next));
        }
      });
    } else {
      RunPieces(threads, Cut(of_a, threads, kRowGrain), shrink);
      RunPieces(threads, Cut(of_b, threads, kColumnGrain), expand);
    }
  });
}

ffi::Error DeltaImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                     I32 b_pages, ffi::RemainingRets rets, Ints group, Ints a_widths, Ints b_widths, int64_t max_rank) {
  auto y = Results(rets, owner, ranks, group, max_rank);
  RunDelta(pool.num_threads(), x, pages, layer, owner, ranks, scale, a_pages, b_pages, y, false, group, a_widths, b_widths,
           max_rank);
  return ffi::Error::Success();
}

ffi::Error AddImpl(ffi::ThreadPool pool, Any x, Any pages, I32 layer, I32 owner, I32 ranks, F32 scale, I32 a_pages,
                   I32 b_pages, ffi::RemainingArgs, ffi::RemainingRets sums, Ints group, Ints a_widths, Ints b_widths,
                   int64_t max_rank, int64_t first) {
  RunDelta(pool.num_threads(), x, pages, layer, owner, ranks, scale, a_pages, b_pages, RowsFrom(sums, group, first), true,
           group, a_widths, b_widths, max_rank);
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

// Results and queries of one group and KV head while they are worked on: heads padded to whole steps.
template <typename Q>
struct HeadRows {
  std::vector<Q> q;
  std::vector<float> out;
  std::vector<int64_t> positions;
  std::vector<Vec> sums;
};

// What a call of attention has, whatever its types.
struct AttentionCall {
  int64_t groups, heads, count, dim, queries;  // count: rows of a group and head
  ScoreMaths maths;
  const int32_t *positions, *tables;
  int64_t table_pages, page_width;
  int page_tokens;
  float *out, *top, *sum;
};

// The pages of group n.
template <typename T>
KvPages<T> PagesOf(const AttentionCall& call, const T* pages, int64_t n) {
  int64_t dim = call.dim;
  return {pages, call.page_width, call.page_tokens * dim, call.heads * call.page_tokens * dim, call.page_tokens,
          static_cast<int>(dim), call.tables + n * call.table_pages, call.table_pages};
}

// What one task does: `heads` heads of group n from `head` on, whose queries see the entries [from, to) of its table.
struct AttentionTask {
  int64_t n, head, heads, from, to;
};

// What a task, which may be null, reads first.
template <typename T>
FirstChunk<T> FirstOf(const KvPages<T>& kv, const AttentionTask* task) {
  if (!task) return {};
  int64_t first = kv.Next(task->from);
  if (first >= task->to) return {};
  return {&kv, first, kv.ChunkEnd(first, task->to), static_cast<int>(task->head)};
}

// Runs a task; `then`, which may be null, is run next. Q is the raw type that queries and weights are kept in.
template <typename T, typename X, typename Q>
void AttendHeads(const AttentionCall& call, const T* pages, const X* q, const AttentionTask& task,
                 const AttentionTask* then) {
  const auto [n, head, heads_of_task, from, to] = task;
  int64_t count = call.count, dim = call.dim, padded = (dim + kStep<T, Q> - 1) / kStep<T, Q> * kStep<T, Q>;
  std::vector<HeadRows<Q>> own(heads_of_task);
  std::vector<Rows<Q>> rows;
  for (int64_t i = 0; i < heads_of_task; ++i) {
    int64_t first = (n * call.heads + head + i) * count;
    HeadRows<Q>& h = own[i];
    h.q.resize(count * padded), h.out.resize(count * padded), h.positions.resize(count), h.sums.resize(count, Vec{});
    for (int64_t r = 0; r < count; ++r) {
      h.positions[r] = call.positions[n * call.queries + r / (count / call.queries)];
      for (int64_t j = 0; j < dim; ++j) Narrow(Widen(q[(first + r) * dim + j]), &h.q[r * padded + j]);
    }
    rows.push_back({h.q.data(), h.positions.data(), static_cast<int>(count), static_cast<int>(padded), h.out.data(),
                    call.top + first, h.sums.data()});
  }
  KvPages<T> kv = PagesOf(call, pages, n), kv_then = PagesOf(call, pages, then ? then->n : n);
  if (padded == dim) {
    Room<Q> room(call.page_tokens);
    Attend(rows, kv, head, from, to, call.maths, FirstOf(kv_then, then), room);
  } else if constexpr (sizeof(Q) == 4) {
    AttendPadded(rows, kv, head, from, to, call.maths);
  }
  for (int64_t i = 0; i < heads_of_task; ++i) {
    int64_t first = (n * call.heads + head + i) * count;
    for (int64_t r = 0; r < count; ++r) {
      float* out = &own[i].out[r * padded];
      for (int64_t j = 0; kPairs<T, Q> && j < dim; j += 2 * kLanes) {
        Vec low, high;
        Unzip(Load(out + j), Load(out + j + kLanes), &low, &high);
        Store(out + j, low), Store(out + j + kLanes, high);
      }
      call.sum[first + r] = Sum(own[i].sums[r]);
      std::memcpy(call.out + (first + r) * dim, out, dim * sizeof(float));
    }
  }
}

#ifdef __AMX_BF16__

// The same on the matrix unit, which is set up for it.
void AttendOnTiles(const AttentionCall& call, const uint16_t* pages, const uint16_t* q, const AttentionTask& task,
                   const AttentionTask* then) {
  const int64_t of_head = call.count * call.dim, first = task.n * call.heads + task.head;
  std::vector<int64_t> positions(call.count);
  for (int64_t r = 0; r < call.count; ++r) {
    positions[r] = call.positions[task.n * call.queries + r / (call.count / call.queries)];
  }
  std::vector<TileRows> rows;
  rows.reserve(task.heads);
  for (int64_t i = first; i < first + task.heads; ++i) rows.emplace_back(q + i * of_head, call.count, call.dim, positions);
  KvPages<uint16_t> kv = PagesOf(call, pages, task.n), kv_then = PagesOf(call, pages, then ? then->n : task.n);
  TileRoom room(RowsOfTiles(call.count), call.dim, call.page_tokens);
  Attend(rows, kv, task.head, task.from, task.to, call.maths, FirstOf(kv_then, then), room);
  for (int64_t i = 0; i < task.heads; ++i) rows[i].Give(call.out, call.top, call.sum, first + i);
}

#endif

ffi::Error AttentionImpl(ffi::ThreadPool pool, Any q, Any pages, I32 layer, I32 tables, I32 positions, I32 window,
                         ffi::Result<F32> out, ffi::Result<F32> top, ffi::Result<F32> sum, float scale, float cap,
                         int32_t page_tokens) {
  auto sizes = pages.dimensions();
  AttentionCall call{q.dimensions()[0], q.dimensions()[1], q.dimensions()[2], q.dimensions()[3], positions.dimensions()[1],
                     {scale, cap, window.typed_data()[0]}, positions.typed_data(), tables.typed_data(),
                     tables.dimensions()[1], sizes[2], page_tokens, out->typed_data(), top->typed_data(), sum->typed_data()};
  std::fill_n(call.top, call.groups * call.heads * call.count, kMasked);
  // Few rows are bound by memory, which likes all heads of a page together, unless that leaves threads without work.
  bool together = call.count <= 2 * kTileRows && call.groups >= 4 * static_cast<int64_t>(pool.num_threads());
  int64_t heads_of_task = together ? call.heads : 1, tasks_of_group = call.heads / heads_of_task;
  std::vector<AttentionTask> tasks;
  for (int64_t n = 0; n < call.groups; ++n) {
    auto seen = SeenTokens(call.positions + n * call.queries, call.queries, call.maths.window);
    int64_t from = seen.first / page_tokens, to = std::min((seen.second + page_tokens - 1) / page_tokens, call.table_pages);
    for (int64_t i = 0; i < tasks_of_group; ++i) tasks.push_back({n, i * heads_of_task, heads_of_task, from, to});
  }
  auto length = [](const AttentionTask& task) { return task.to - task.from; };
  // The longest first, so that no thread waits long for another at the end.
  std::stable_sort(tasks.begin(), tasks.end(), [&](const auto& a, const auto& b) { return length(a) > length(b); });
  std::vector<int64_t> costs;
  int64_t of_page = 2 * call.dim * page_tokens * heads_of_task * ((call.count + kTileRows - 1) / kTileRows);
  for (const AttentionTask& task : tasks) costs.push_back(length(task) * of_page);
  ForTypes(pages, q, [&](auto page_type, auto q_type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(page_type)>>;
    using X = std::remove_const_t<std::remove_pointer_t<decltype(q_type)>>;
    const T* of_layer = Numbers<T>(pages) + layer.typed_data()[0] * sizes[1] * sizes[2];
    auto attend = AttendHeads<T, X, uint32_t>;
    if constexpr (kPairs<T, X>) {
      if (call.dim % (2 * kLanes) == 0) attend = AttendHeads<T, X, X>;
    }
    [[maybe_unused]] bool on_tiles = false;
#ifdef __AMX_BF16__
    if constexpr (kPairs<T, X>) {
      if ((on_tiles = AttendsOnMatrixUnit(call.count, call.dim, page_tokens))) attend = AttendOnTiles;
    }
#endif
    Parallel(pool.num_threads(), costs, [&](int begin, int end) {
#ifdef __AMX_BF16__
      std::optional<AttentionTiles> tiles;
      if (on_tiles) tiles.emplace(RowsOfTiles(call.count));
#endif
      for (int i = begin; i < end; ++i) {
        attend(call, of_layer, Numbers<X>(q), tasks[i], i + 1 < end ? &tasks[i + 1] : nullptr);
      }
    });
  });
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
