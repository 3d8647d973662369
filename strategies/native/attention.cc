// Attention over pages as functions of XLA, of numbers and of int8. The contract is that of the XLA version
// (strategies/paged_attention.py); numbers are raw bits of bfloat16 or float32. See attention.h.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "int8_pages.h"
#include "low_rank_operands.h"
#include "matrix_attention.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

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
  int64_t part = call.page_width / 2;
  return {pages, call.page_width, part / call.heads, part, call.page_tokens,
          static_cast<int>(call.dim), call.tables + n * call.table_pages, call.table_pages};
}

// The same as its tasks read them.
template <typename T, bool kInt8>
using PagesFor = std::conditional_t<kInt8, Int8Pages<T>, KvPages<T>>;

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
template <bool kInt8, typename T, typename X, typename Q>
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
  const PagesFor<T, kInt8> kv(PagesOf(call, pages, n));
  const KvPages<T> kv_then = PagesOf(call, pages, then ? then->n : n);
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
template <bool kInt8>
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
  const PagesFor<uint16_t, kInt8> kv(PagesOf(call, pages, task.n));
  const KvPages<uint16_t> kv_then = PagesOf(call, pages, then ? then->n : task.n);
  TileRoom room(RowsOfTiles(call.count), call.dim, call.page_tokens);
  Attend(rows, kv, task.head, task.from, task.to, call.maths, FirstOf(kv_then, then), room);
  for (int64_t i = 0; i < task.heads; ++i) rows[i].Give(call.out, call.top, call.sum, first + i);
}

#endif

template <bool kInt8>
ffi::Error AttentionImpl(ffi::ThreadPool pool, Any q, Any pages, I32 layer, I32 tables, I32 positions, I32 window,
                         ffi::Result<F32> out, ffi::Result<F32> top, ffi::Result<F32> sum, float scale, float cap,
                         int32_t page_tokens) {
  auto sizes = pages.dimensions();
  AttentionCall call{q.dimensions()[0], q.dimensions()[1], q.dimensions()[2], q.dimensions()[3], positions.dimensions()[1],
                     {scale, cap, window.typed_data()[0]}, positions.typed_data(), tables.typed_data(),
                     tables.dimensions()[1], sizes[2], page_tokens, out->typed_data(), top->typed_data(), sum->typed_data()};
  std::fill_n(call.top, call.groups * call.heads * call.count, kMasked);
  std::vector<AttentionTask> tasks;  // of groups that see something, at first
  for (int64_t n = 0; n < call.groups; ++n) {
    auto seen = SeenTokens(call.positions + n * call.queries, call.queries, call.maths.window);
    int64_t from = seen.first / page_tokens, to = std::min((seen.second + page_tokens - 1) / page_tokens, call.table_pages);
    if (from < to) {
      tasks.push_back({n, 0, call.heads, from, to});
    } else {
      int64_t rows = call.heads * call.count;
      std::fill_n(call.out + n * rows * call.dim, rows * call.dim, 0.0f);
      std::fill_n(call.sum + n * rows, rows, 0.0f);
    }
  }
  // Few rows are bound by memory, which likes all heads of a page together, unless that leaves threads without work.
  bool together = call.count <= 2 * kTileRows && static_cast<int64_t>(tasks.size()) >= 4 * pool.num_threads();
  int64_t heads_of_task = together ? call.heads : 1;
  if (!together) {
    std::vector<AttentionTask> of_heads;
    for (const AttentionTask& group : tasks) {
      for (int64_t head = 0; head < call.heads; ++head) of_heads.push_back({group.n, head, 1, group.from, group.to});
    }
    tasks = std::move(of_heads);
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
    auto attend = AttendHeads<kInt8, T, X, uint32_t>;
    if constexpr (kPairs<T, X>) {
      if (call.dim % (2 * kLanes) == 0) attend = AttendHeads<kInt8, T, X, X>;
    }
    [[maybe_unused]] bool on_tiles = false;
#ifdef __AMX_BF16__
    if constexpr (kPairs<T, X>) {
      if ((on_tiles = AttendsOnMatrixUnit(call.count, call.dim, page_tokens))) attend = AttendOnTiles<kInt8>;
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

auto AttentionOperands() {
  return ffi::Ffi::Bind()
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
      .Attr<int32_t>("page_tokens");
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_partial_attention, AttentionImpl<false>, AttentionOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_int8_partial_attention, AttentionImpl<true>, AttentionOperands());
