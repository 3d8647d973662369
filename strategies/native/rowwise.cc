// Functions of rows that XLA cuts into passes of their own, as functions of XLA: the gate of an MLP, and the largest of
// a row's numbers.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using U16 = ffi::Buffer<ffi::U16>;
using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

constexpr int64_t kBlock = 1024;  // numbers of a task of the gate
constexpr int64_t kOfActivation = 16;  // of one number, in the units of `Parallel`

Vec Sigmoid(Vec x) {
  Vec least = x < -88.0f ? Splat(-88.0f) : x;
  return x < -88.0f ? Vec{} : 1.0f / (1.0f + Exp(-least));
}
Vec Silu(Vec x) { return x * Sigmoid(x); }
Vec Gelu(Vec x) { return x * Sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }  // by tanh, without its cancellation

// out = round(activation(gate)) * up, for bfloat16.
template <Vec (*kActivation)(Vec)>
void Gate(const uint16_t* gate, const uint16_t* up, uint16_t* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    uint16_t rounded[kLanes];
    Store(rounded, kActivation(Load(gate + i)));
    Store(out + i, Load(rounded) * Load(up + i));
  }
  if (i == count) return;
  uint16_t rest[3][kLanes] = {};
  std::copy(gate + i, gate + count, rest[0]), std::copy(up + i, up + count, rest[1]);
  Gate<kActivation>(rest[0], rest[1], rest[2], kLanes);
  std::copy_n(rest[2], count - i, out + i);
}

ffi::Error GatedImpl(ffi::ThreadPool pool, U16 gate, U16 up, ffi::Result<U16> out, bool silu) {
  int64_t count = gate.element_count();
  std::vector<int64_t> costs((count + kBlock - 1) / kBlock, kBlock * kOfActivation);
  Parallel(pool.num_threads(), costs, [&](int begin, int end) {
    int64_t from = begin * kBlock, numbers = std::min(end * kBlock, count) - from;
    auto run = silu ? Gate<Silu> : Gate<Gelu>;
    run(gate.typed_data() + from, up.typed_data() + from, out->typed_data() + from, numbers);
  });
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
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<U16>().Arg<U16>().Ret<U16>().Attr<bool>("silu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_first_best, FirstBestImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<I32>());
