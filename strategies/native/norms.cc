// RMS norms and rotations of bfloat16 rows, as functions of XLA: a row is read once, and what it gives depends on it alone.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "rows.h"
#include "threads.h"
#include "used_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using Any = ffi::AnyBuffer;
using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

// What rows are multiplied by, and how.
struct Norm {
  const uint16_t* weight;
  int64_t width;
  float eps;
  bool offset;  // by 1 + weight before the only rounding, else rounded before and after
};

// 1 / the root of the mean square of a row, whose numbers two(i, count) gives by 2 * kLanes.
template <typename F>
float InverseRms(const Norm& norm, const F& two) {
  Vec sums[4] = {};  // several at a time
  auto add = [](Vec* sums, Two part) { sums[0] += part.a * part.a, sums[1] += part.b * part.b; };
  constexpr int kTwo = 2 * kLanes;
  const std::integral_constant<int, kTwo> all;
  int64_t i = 0;
  for (; i + 2 * kTwo <= norm.width; i += 2 * kTwo) add(sums, two(i, all)), add(sums + 2, two(i + kTwo, all));
  if (i + kTwo <= norm.width) add(sums, two(i, all)), i += kTwo;
  if (i < norm.width) add(sums + 2, two(i, static_cast<int>(norm.width - i)));
  float mean = Sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(norm.width);
  return 1.0f / std::sqrt(mean + norm.eps);
}

template <typename T>
float InverseRmsOf(const T* x, const Norm& norm) {
  return InverseRms(norm, [&](int64_t i, auto count) { return LoadTwo(x + i, count); });
}

// As above of x + y, which is left in `sum`.
template <typename T>
float InverseRmsOfSum(const uint16_t* x, const T* y, uint16_t* sum, const Norm& norm) {
  return InverseRms(norm, [&](int64_t i, auto count) {
    Two a = LoadTwo(x + i, count), b = LoadTwo(y + i, count);
    StoreTwo(sum + i, {a.a + b.a, a.b + b.b}, count);
    return LoadTwo(sum + i, count);
  });
}

template <typename T>
void Scale(const T* x, float factor, const Norm& norm, uint16_t* out) {
  auto scaled = [&](Vec part, Vec weight) {
    return norm.offset ? part * factor * (1.0f + weight) : Rounded(part * factor) * weight;
  };
  ForTwos(norm.width, [&](int64_t i, auto count) {
    Two part = LoadTwo(x + i, count), weight = LoadTwo(norm.weight + i, count);
    StoreTwo(out + i, {scaled(part.a, weight.a), scaled(part.b, weight.b)}, count);
  });
}

constexpr int64_t kOfNorm = 2;  // of one number, in the units of `Parallel`

// Calls run(row) for each row.
template <typename F>
void ForRows(int threads, int64_t rows, int64_t width, const F& run) {
  Parallel(threads, std::vector<int64_t>(rows, width * kOfNorm), [&](int begin, int end) {
    for (int64_t row = begin; row < end; ++row) run(row);
  });
}

// Zeros for the rows [first, count), `width` numbers of each.
void FillRest(uint16_t* out, int64_t first, int64_t count, int64_t width) {
  std::fill_n(out + first * width, (count - first) * width, 0);
}

template <typename T>
void RmsNorm(int threads, const Any& x, int64_t used, const Norm& norm, uint16_t* out) {
  auto rows = static_cast<const T*>(x.untyped_data());
  ForRows(threads, used, norm.width, [&](int64_t row) {
    const T* from = rows + row * norm.width;
    Scale(from, InverseRmsOf(from, norm), norm, out + row * norm.width);
  });
}

ffi::Error RmsNormImpl(ffi::ThreadPool pool, Any x, Bf16 weight, I32 used, ffi::Result<Bf16> out, float eps,
                       bool offset) {
  Norm norm{weight.typed_data(), static_cast<int64_t>(weight.element_count()), eps, offset};
  auto run = x.element_type() == ffi::F32 ? RmsNorm<float> : RmsNorm<uint16_t>;
  int64_t all = norm.width ? x.element_count() / norm.width : 0, count = UsedRows(used, all);
  run(pool.num_threads(), x, count, norm, out->typed_data());
  FillRest(out->typed_data(), count, all, norm.width);
  return ffi::Error::Success();
}

template <typename T>
void AddRmsNorm(int threads, Bf16 x, const Any& y, int64_t used, const Norm& norm, uint16_t* sums, uint16_t* out) {
  auto added = static_cast<const T*>(y.untyped_data());
  ForRows(threads, used, norm.width, [&](int64_t row) {
    int64_t at = row * norm.width;
    float factor = InverseRmsOfSum(x.typed_data() + at, added + at, sums + at, norm);
    Scale(sums + at, factor, norm, out + at);
  });
}

ffi::Error AddRmsNormImpl(ffi::ThreadPool pool, Bf16 x, Any y, Bf16 weight, I32 used, ffi::Result<Bf16> sums,
                          ffi::Result<Bf16> out, float eps, bool offset) {
  Norm norm{weight.typed_data(), static_cast<int64_t>(weight.element_count()), eps, offset};
  auto run = y.element_type() == ffi::F32 ? AddRmsNorm<float> : AddRmsNorm<uint16_t>;
  int64_t all = norm.width ? x.element_count() / norm.width : 0, count = UsedRows(used, all);
  run(pool.num_threads(), x, y, count, norm, sums->typed_data(), out->typed_data());
  FillRest(sums->typed_data(), count, all, norm.width);
  FillRest(out->typed_data(), count, all, norm.width);
  return ffi::Error::Success();
}

// One head of a token: number i is paired with i + half.
template <typename T>
void RotateHead(const T* x, const float* cos, const float* sin, int64_t half, uint16_t* out) {
  ForParts(half, [&](int64_t i, auto count) {
    Vec low = LoadRounded(x + i, count), high = LoadRounded(x + half + i, count);
    Vec c = LoadPart(cos + i, count), s = LoadPart(sin + i, count);
    StorePart(out + i, low * c - high * s, count);
    StorePart(out + half + i, high * c + low * s, count);
  });
}

template <typename T>
void Rotate(int threads, const Any& x, F32 cos, F32 sin, I32 used, uint16_t* out) {
  auto numbers = static_cast<const T*>(x.untyped_data());
  int64_t head = x.dimensions().back(), half = head / 2, width = x.dimensions()[x.dimensions().size() - 2] * head;
  int64_t all = width ? x.element_count() / width : 0, count = UsedRows(used, all);
  FillRest(out, count, all, width);
  ForRows(threads, count, width, [&](int64_t token) {
    for (int64_t at = token * width; at < (token + 1) * width; at += head) {
      RotateHead(numbers + at, cos.typed_data() + token * half, sin.typed_data() + token * half, half, out + at);
    }
  });
}

ffi::Error RotateImpl(ffi::ThreadPool pool, Any x, F32 cos, F32 sin, I32 used, ffi::Result<Bf16> out) {
  auto run = x.element_type() == ffi::F32 ? Rotate<float> : Rotate<uint16_t>;
  run(pool.num_threads(), x, cos, sin, used, out->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    plora_rms_norm, RmsNormImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Bf16>().Arg<I32>().Ret<Bf16>().Attr<float>("eps").Attr<bool>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_add_rms_norm, AddRmsNormImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bf16>()
                                  .Arg<Any>()
                                  .Arg<Bf16>()
                                  .Arg<I32>()
                                  .Ret<Bf16>()
                                  .Ret<Bf16>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_rotate, RotateImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<F32>().Arg<F32>().Arg<I32>().Ret<Bf16>());
