// CPU kernels for what XLA does far from the machine's limit, called through jax.ffi.
//
// lora_delta: y[t] = sum over the rank components s of t's adapter of scale[s] * (x[t] . a[s]) * b[s].
// Each component is read once a call however many tokens use it, and a token's sums run in the order of its adapter's
// components, so a result does not depend on what else is in the batch.
//
// decode_attention: attention of single queries over paged keys and values, each KV byte read once.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef uint32_t Word __attribute__((vector_size(4 * kLanes), aligned(4)));

inline float Widen(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float Widen(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline Vec Load(const uint16_t* p) {
  Word word = __builtin_convertvector(*reinterpret_cast<const Half*>(p), Word) << 16;
  return reinterpret_cast<Vec>(word);
}
inline Vec Load(const uint32_t* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void Store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec Splat(float x) { return Vec{} + x; }

inline float Sum(Vec v) {
  typedef float V8 __attribute__((vector_size(32)));
  typedef float V4 __attribute__((vector_size(16)));
  V8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  V4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// Tasks are claimed one by one. The caller claims too and waits only for tasks that another thread has begun, so it
// cannot deadlock when the pool is busy; helpers that start too late find nothing to do.
class Job {
 public:
  Job(int tasks, std::function<void(int)> run) : tasks_(tasks), run_(std::move(run)) {}
  void Work() {
    for (int task; (task = next_.fetch_add(1)) < tasks_;) {
      run_(task);
      if (done_.fetch_add(1) + 1 == tasks_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }
  void Wait() {
    for (int spin = 0; spin < 4096; ++spin) {
      if (done_.load() == tasks_) return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() == tasks_; });
  }

 private:
  const int tasks_;
  std::function<void(int)> run_;
  std::atomic<int> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

void Parallel(ffi::ThreadPool& pool, int tasks, std::function<void(int)> run) {
  if (tasks <= 0) return;
  auto job = std::make_shared<Job>(tasks, std::move(run));
  int helpers = std::min<int>(tasks, pool.num_threads()) - 1;
  for (int i = 0; i < helpers; ++i) pool.Schedule([job] { job->Work(); });
  job->Work();
  job->Wait();
}

// The rank components of one adapter and the tokens that use it.
struct Segment {
  int first, count;
  std::vector<int> tokens;
};

std::vector<Segment> Segments(const int32_t* owner, int tokens, const int32_t* slot_owner, int slots) {
  std::vector<Segment> segments;
  std::vector<int> of_owner;
  for (int s = 0; s < slots; ++s) {
    int who = slot_owner[s];
    if (who < 0) continue;
    if (segments.empty() || s == 0 || slot_owner[s - 1] != who) {
      if (who >= static_cast<int>(of_owner.size())) of_owner.resize(who + 1, -1);
      of_owner[who] = segments.size();
      segments.push_back({s, 0, {}});
    }
    segments.back().count++;
  }
  for (int t = 0; t < tokens; ++t) {
    int who = owner[t];
    if (who >= 0 && who < static_cast<int>(of_owner.size()) && of_owner[who] >= 0) {
      segments[of_owner[who]].tokens.push_back(t);
    }
  }
  return segments;
}

// m[i] = x[tokens[i]] . a for all tokens of a segment, four tokens at a time.
template <typename T>
void Shrink(const float* x, int width, const T* a, const std::vector<int>& tokens, float scale, float* m, int stride) {
  int whole = width / kLanes * kLanes;
  size_t i = 0;
  for (; i + 4 <= tokens.size(); i += 4) {
    const float* rows[4];
    for (int j = 0; j < 4; ++j) rows[j] = x + static_cast<int64_t>(tokens[i + j]) * width;
    Vec acc[4] = {};
    for (int k = 0; k < whole; k += kLanes) {
      Vec v = Load(a + k);
      for (int j = 0; j < 4; ++j) acc[j] += v * Load(rows[j] + k);
    }
    for (int j = 0; j < 4; ++j) {
      float sum = Sum(acc[j]);
      for (int k = whole; k < width; ++k) sum += Widen(a[k]) * rows[j][k];
      m[(i + j) * stride] = sum * scale;
    }
  }
  for (; i < tokens.size(); ++i) {
    const float* row = x + static_cast<int64_t>(tokens[i]) * width;
    Vec acc = {};
    for (int k = 0; k < whole; k += kLanes) acc += Load(a + k) * Load(row + k);
    float sum = Sum(acc);
    for (int k = whole; k < width; ++k) sum += Widen(a[k]) * row[k];
    m[i * stride] = sum * scale;
  }
}

// y[tokens[i], begin:end] += sum over `count` rows of m[i, row] * b[row], four rows at a time.
template <typename T>
void Expand(const float* m, int stride, const T* const* b, int count, const std::vector<int>& tokens, float* y, int width,
            int begin, int end) {
  int whole = begin + (end - begin) / kLanes * kLanes;
  for (int r = 0; r < count; r += 4) {
    int rows = std::min(4, count - r);
    for (size_t i = 0; i < tokens.size(); ++i) {
      float* out = y + static_cast<int64_t>(tokens[i]) * width;
      float f[4] = {};
      for (int j = 0; j < rows; ++j) f[j] = m[i * stride + r + j];
      if (rows == 4) {
        Vec f0 = Splat(f[0]), f1 = Splat(f[1]), f2 = Splat(f[2]), f3 = Splat(f[3]);
        for (int k = begin; k < whole; k += kLanes) {
          Vec v = Load(out + k);
          v += f0 * Load(b[r] + k);
          v += f1 * Load(b[r + 1] + k);
          v += f2 * Load(b[r + 2] + k);
          v += f3 * Load(b[r + 3] + k);
          Store(out + k, v);
        }
      } else {
        for (int j = 0; j < rows; ++j) {
          Vec fj = Splat(f[j]);
          for (int k = begin; k < whole; k += kLanes) Store(out + k, Load(out + k) + fj * Load(b[r + j] + k));
        }
      }
      for (int j = 0; j < rows; ++j) {
        for (int k = whole; k < end; ++k) out[k] += f[j] * Widen(b[r + j][k]);
      }
    }
  }
}

// bfloat16 operands are rounded between shrink and expand, as the products of a bfloat16 model are.
inline float RoundToBfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0x7FFF + ((bits >> 16) & 1);
  return Widen(static_cast<uint16_t>(bits >> 16));
}

template <typename T>
struct Projection {
  const T *a, *b;
  const float* scale;
  float* y;
  int out;
};

template <typename T>
void LoraDelta(ffi::ThreadPool& pool, const T* x, int tokens, int width, const std::vector<Projection<T>>& projections,
               const std::vector<Segment>& segments, const int32_t* slots) {
  constexpr bool kHalf = sizeof(T) == 2;
  std::vector<float> wide(static_cast<size_t>(tokens) * width);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = Widen(x[i]);
  // One task is one adapter: its shrink, then its expand. Segments share no token, so no task waits for another; the
  // largest go first, and little work is not worth waking another thread.
  std::vector<int> order;
  int64_t elements = 0;
  for (size_t s = 0; s < segments.size(); ++s) {
    if (segments[s].tokens.empty()) continue;
    order.push_back(s);
    for (const auto& p : projections) elements += static_cast<int64_t>(segments[s].count) * (width + p.out);
  }
  auto work = [&](int s) { return static_cast<int64_t>(segments[s].count) * segments[s].tokens.size(); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return work(a) > work(b); });
  auto run = [&](int index) {
    const Segment& segment = segments[order[index]];
    std::vector<float> shrunk(segment.tokens.size() * segment.count);
    std::vector<const T*> rows(segment.count);
    for (const auto& projection : projections) {
      int used = 0;  // components are used from the front, so those up to the last used one are all there is to read
      std::fill(shrunk.begin(), shrunk.end(), 0.0f);
      for (int r = 0; r < segment.count; ++r) {
        int64_t slot = slots[segment.first + r];
        rows[r] = projection.b + slot * projection.out;
        float scale = projection.scale[slot];
        if (scale == 0.0f) continue;
        used = r + 1;
        Shrink(wide.data(), width, projection.a + slot * width, segment.tokens, scale, shrunk.data() + r, segment.count);
      }
      if (kHalf) {
        for (float& value : shrunk) value = RoundToBfloat16(value);
      }
      Expand(shrunk.data(), segment.count, rows.data(), used, segment.tokens, projection.y, projection.out, 0,
             projection.out);
    }
  };
  constexpr int64_t kWorthAThread = 1 << 16;
  if (elements < kWorthAThread) {
    for (size_t i = 0; i < order.size(); ++i) run(i);
  } else {
    Parallel(pool, order.size(), run);
  }
}

template <typename T>
ffi::Error RunLora(ffi::ThreadPool pool, ffi::AnyBuffer x, const int32_t* layer, ffi::AnyBuffer owner,
                   ffi::AnyBuffer slots, ffi::AnyBuffer slot_owner, int used, ffi::RemainingArgs rest,
                   ffi::RemainingRets outs) {
  int tokens = x.dimensions()[0], width = x.dimensions()[1];
  std::vector<Projection<T>> projections;
  for (size_t p = 0; p < outs.size(); ++p) {
    auto a = rest.get<ffi::AnyBuffer>(3 * p), b = rest.get<ffi::AnyBuffer>(3 * p + 1), s = rest.get<ffi::AnyBuffer>(3 * p + 2);
    auto y = outs.get<ffi::AnyBuffer>(p);
    if (!a.has_value() || !b.has_value() || !s.has_value() || !y.has_value()) {
      return ffi::Error::InvalidArgument("lora_delta: a, b, scale and a result are needed for each projection");
    }
    int64_t num_slots = a->dimensions()[1], out = b->dimensions()[2], at = *layer;
    float* result = static_cast<float*>((*y)->untyped_data());
    std::memset(result, 0, (*y)->size_bytes());
    projections.push_back({static_cast<const T*>(a->untyped_data()) + at * num_slots * width,
                           static_cast<const T*>(b->untyped_data()) + at * num_slots * out,
                           static_cast<const float*>(s->untyped_data()) + at * num_slots, result, static_cast<int>(out)});
  }
  if (used) {
    auto segments = Segments(static_cast<const int32_t*>(owner.untyped_data()), tokens,
                             static_cast<const int32_t*>(slot_owner.untyped_data()), used);
    LoraDelta<T>(pool, static_cast<const T*>(x.untyped_data()), tokens, width, projections, segments,
                 static_cast<const int32_t*>(slots.untyped_data()));
  }
  return ffi::Error::Success();
}

ffi::Error LoraDeltaImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer owner,
                         ffi::AnyBuffer slots, ffi::AnyBuffer slot_owner, ffi::Buffer<ffi::S32> chunks,
                         ffi::RemainingArgs rest, ffi::RemainingRets outs, int32_t chunk_rows) {
  int used = chunks.typed_data()[0] * chunk_rows;
  auto run = x.element_type() == ffi::U16 ? RunLora<uint16_t> : RunLora<uint32_t>;
  return run(pool, x, layer.typed_data(), owner, slots, slot_owner, used, rest, outs);
}

// One query group (a sequence) and one KV head; R query heads. Scores of a page at a time, online softmax.
template <typename T>
void AttendHead(const float* q, int repeats, int dim, const T* k, const T* v, int64_t page_stride, const int32_t* table,
                int page_tokens, int from, int to, float scale, float cap, float* out, float* top, float* sum) {
  std::vector<float> scores(static_cast<size_t>(repeats) * page_tokens);
  for (int page = from / page_tokens; page * page_tokens < to; ++page) {
    const T* keys = k + table[page] * page_stride;
    const T* values = v + table[page] * page_stride;
    int begin = std::max(from - page * page_tokens, 0), end = std::min(to - page * page_tokens, page_tokens);
    for (int s = begin; s < end; ++s) {
      const T* key = keys + s * dim;
      for (int r = 0; r < repeats; ++r) {
        const float* query = q + r * dim;
        Vec acc = {};
        int j = 0;
        for (; j + kLanes <= dim; j += kLanes) acc += Load(key + j) * Load(query + j);
        float score = Sum(acc);
        for (; j < dim; ++j) score += Widen(key[j]) * query[j];
        score *= scale;
        scores[r * page_tokens + s] = cap > 0 ? cap * std::tanh(score / cap) : score;
      }
    }
    for (int r = 0; r < repeats; ++r) {
      float* score = scores.data() + r * page_tokens;
      float best = top[r];
      for (int s = begin; s < end; ++s) best = std::max(best, score[s]);
      float decay = std::exp(top[r] - best), total = sum[r] * decay;
      for (int s = begin; s < end; ++s) total += score[s] = std::exp(score[s] - best);
      float* o = out + r * dim;
      int j = 0;
      for (; j + kLanes <= dim; j += kLanes) {
        Vec acc = Load(o + j) * decay;
        for (int s = begin; s < end; ++s) acc += Splat(score[s]) * Load(values + s * dim + j);
        Store(o + j, acc);
      }
      for (; j < dim; ++j) {
        float acc = o[j] * decay;
        for (int s = begin; s < end; ++s) acc += score[s] * Widen(values[s * dim + j]);
        o[j] = acc;
      }
      top[r] = best;
      sum[r] = total;
    }
  }
}

template <typename T>
void DecodeAttention(ffi::ThreadPool& pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, int64_t layer,
                     const int32_t* tables, int table_pages, const int32_t* positions, int window, float scale, float cap,
                     float* out, float* top, float* sum) {
  int groups = q.dimensions()[0], heads = q.dimensions()[1], repeats = q.dimensions()[2], dim = q.dimensions()[3];
  int64_t pages = k.dimensions()[1];
  int page_tokens = k.dimensions()[3];
  int64_t head_stride = static_cast<int64_t>(page_tokens) * dim, page_stride = heads * head_stride;
  const T* queries = static_cast<const T*>(q.untyped_data());
  const T* keys = static_cast<const T*>(k.untyped_data()) + layer * pages * page_stride;
  const T* values = static_cast<const T*>(v.untyped_data()) + layer * pages * page_stride;
  Parallel(pool, groups * heads, [&](int task) {
    int group = task / heads, head = task % heads;
    int position = positions[group];
    int64_t row = static_cast<int64_t>(task) * repeats;
    std::memset(out + row * dim, 0, sizeof(float) * repeats * dim);
    for (int r = 0; r < repeats; ++r) top[row + r] = -1e30f, sum[row + r] = 0;
    if (position < 0) return;
    std::vector<float> wide(static_cast<size_t>(repeats) * dim);
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = Widen(queries[row * dim + i]);
    AttendHead(wide.data(), repeats, dim, keys + head * head_stride, values + head * head_stride, page_stride,
               tables + static_cast<int64_t>(group) * table_pages, page_tokens,
               static_cast<int>(std::max<int64_t>(0, static_cast<int64_t>(position) - window + 1)), position + 1, scale,
               cap, out + row * dim, top + row, sum + row);
  });
}

ffi::Error DecodeAttentionImpl(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                               ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> tables,
                               ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> window,
                               ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> top,
                               ffi::ResultBuffer<ffi::F32> sum, float scale, float cap) {
  auto run = q.element_type() == ffi::U16 ? DecodeAttention<uint16_t> : DecodeAttention<uint32_t>;
  run(pool, q, k, v, layer.typed_data()[0], tables.typed_data(), tables.dimensions()[1], positions.typed_data(),
      window.typed_data()[0], scale, cap, out->typed_data(), top->typed_data(), sum->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_lora_delta, LoraDeltaImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("chunk_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_decode_attention, DecodeAttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));
