// Functions of rows that XLA cuts into passes of their own, as functions of XLA: the gate of an MLP, the largest of a
// row's numbers, and sums.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "rows.h"
#include "threads.h"
#include "used_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

constexpr int64_t kBlock = 1024;  // numbers of a task of the gate
constexpr int64_t kOfActivation = 2;  // of one number, in the units of `Parallel`

// 1 / (1 + exp(-x)), relative error 4e-6; 0 below -87. In AVX-512 half the time of `Exp` and a division.
inline Vec Sigmoid(Vec x) {
#ifdef __AVX512F__
  auto raw = [](Vec v) { return reinterpret_cast<__m512>(v); };
  auto vec = [](__m512 v) { return reinterpret_cast<Vec>(v); };
  Vec power = x * -1.44269504f, r = vec(_mm512_reduce_ps(raw(power), _MM_FROUND_TO_NEG_INF));  // power - floor(power)
  Vec p = Splat(0.0018775765f) * r + 0.0089893406f;  // of 2^r, by least largest error
  p = p * r + 0.055826318f;
  p = p * r + 0.24015361f;
  p = p * r + 0.69315308f;
  p = p * r + 0.99999994f;
  Vec sum = 1.0f + vec(_mm512_scalef_ps(raw(p), raw(power)));  // by 2^floor(power)
  Vec guess = vec(_mm512_rcp14_ps(raw(sum)));
  Vec result = guess + guess * (1.0f - sum * guess);
#else
  Vec result = 1.0f / (1.0f + Exp(x < -87.0f ? Splat(87.0f) : -x));
#endif
  return x < -87.0f ? Vec{} : result;
}
inline Vec Silu(Vec x) { return x * Sigmoid(x); }
inline Vec Gelu(Vec x) { return x * Sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }  // by tanh, which would cancel

// out = round(activation(gate)) * up, for numbers that are bfloat16 or first rounded to it.
template <Vec (*kActivation)(Vec), typename T>
void Gate(const T* gate, const T* up, uint16_t* out, int64_t count) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    Two g = LoadTwo(gate + i), u = LoadTwo(up + i);
    StoreTwo(out + i, {Rounded(kActivation(g.a)) * u.a, Rounded(kActivation(g.b)) * u.b});
  }
  if (i == count) return;
  T rest[2][2 * kLanes] = {};
  uint16_t last[2 * kLanes];
  std::copy(gate + i, gate + count, rest[0]), std::copy(up + i, up + count, rest[1]);
  Gate<kActivation>(rest[0], rest[1], last, 2 * kLanes);
  std::copy_n(last, count - i, out + i);
}

template <typename T>
void Gated(int threads, const ffi::AnyBuffer& gate, const ffi::AnyBuffer& up, int64_t count, uint16_t* out, bool silu) {
  auto x = static_cast<const T*>(gate.untyped_data()), y = static_cast<const T*>(up.untyped_data());
  std::vector<int64_t> costs((count + kBlock - 1) / kBlock, kBlock * kOfActivation);
  Parallel(threads, costs, [&](int begin, int end) {
    int64_t from = begin * kBlock, numbers = std::min(end * kBlock, count) - from;
    auto run = silu ? Gate<Silu, T> : Gate<Gelu, T>;
    run(x + from, y + from, out + from, numbers);
  });
}

ffi::Error GatedImpl(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up, I32 used, ffi::Result<Bf16> out,
                     bool silu) {
  auto run = gate.element_type() == ffi::F32 ? Gated<float> : Gated<uint16_t>;
  int64_t all = gate.element_count(), width = gate.dimensions().size() ? gate.dimensions().back() : 1;
  int64_t count = width ? UsedRows(used, all / width) * width : 0;
  run(pool.num_threads(), gate, up, count, out->typed_data(), silu);
  std::fill_n(out->typed_data() + count, all - count, 0);
  return ffi::Error::Success();
}

// Adds `count` numbers of either type to as many sums.
template <typename T>
void Add(const T* part, float* sums, int64_t count) {
  ForParts(count, [&](int64_t i, auto some) { StorePart(sums + i, LoadPart(sums + i, some) + LoadPart(part + i, some), some); });
}

// Parts [tokens, O] are added to the rows of sums [., O] from `first` on, which results share with operands.
ffi::Error AddRowsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets sums, int64_t first) {
  for (size_t i = 0; i < sums.size(); ++i) {
    auto part = args.get<ffi::AnyBuffer>(i).value();
    float* to = sums.get<F32>(i).value()->typed_data() + first * part.dimensions()[1];
    const int64_t count = part.element_count();
    Parallel(pool.num_threads(), std::vector<int64_t>((count + kBlock - 1) / kBlock, kBlock), [&](int begin, int end) {
      const int64_t from = begin * kBlock, numbers = std::min(end * kBlock, count) - from;
      if (part.element_type() == ffi::BF16) {
        Add(static_cast<const uint16_t*>(part.untyped_data()) + from, to + from, numbers);
      } else {
        Add(static_cast<const float*>(part.untyped_data()) + from, to + from, numbers);
      }
    });
  }
  return ffi::Error::Success();
}

// Place of the largest number, of equal ones the first; NaN is less than any other.
int32_t FirstBest(const float* x, int64_t count) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int kChains = 4;
  Vec best[kChains];
  Int place[kChains];
  for (int c = 0; c < kChains; ++c) best[c] = Splat(kLeast), place[c] = Int{} + INT32_MAX;
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      Vec value = Load(x + i + c * kLanes);
      Int more = value > best[c];
      best[c] = more ? value : best[c];
      place[c] = more ? lane + static_cast<int32_t>(i + c * kLanes) : place[c];
    }
  }
  float most = kLeast;
  int32_t at = INT32_MAX;
  auto offer = [&](float value, int32_t where) {
    if (value > most || (value == most && where < at)) most = value, at = where;
  };
  for (int c = 0; c < kChains; ++c) {
    for (int l = 0; l < kLanes; ++l) offer(best[c][l], place[c][l]);
  }
  for (; i < count; ++i) offer(x[i], static_cast<int32_t>(i));
  if (most > kLeast) return at;
  const float* first = std::find(x, x + count, kLeast);
  return first == x + count ? 0 : static_cast<int32_t>(first - x);
}

ffi::Error FirstBestImpl(ffi::ThreadPool pool, F32 x, ffi::Result<I32> out) {
  int64_t rows = x.dimensions()[0], count = x.dimensions()[1];
  Parallel(pool.num_threads(), std::vector<int64_t>(rows, count), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) out->typed_data()[row] = FirstBest(x.typed_data() + row * count, count);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    plora_gated, GatedImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<I32>().Ret<Bf16>().Attr<bool>("silu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    plora_add_rows, AddRowsImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>("first"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_first_best, FirstBestImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<I32>());
