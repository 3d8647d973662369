// The matrix unit's products as functions of XLA. See products.h and int8_products.h.

#include "products.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "int8_products.h"
#include "used_rows.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;
using U16 = ffi::Buffer<ffi::U16>;
using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S8 = ffi::Buffer<ffi::S8>;

// Weights [layers, O / 16, I / 32, 512] of one projection, and where its results go.
struct Projection {
  const uint16_t* weights;  // of this layer
  int64_t column_tiles;
  float* y;
};

// Zeros for the rows [first, count) of y [., stride], `width` numbers of each.
void FillRest(float* y, int64_t first, int64_t count, int64_t width, int64_t stride) {
  for (int64_t row = first; row < count; ++row) std::fill_n(y + row * stride, width, 0.0f);
}

ffi::Error ProductsImpl(ffi::ThreadPool pool, I32 layer, I32 used, Bf16 x, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
#ifdef __AMX_BF16__
  const int64_t count = x.dimensions()[0];
  ProductRows rows{x.typed_data(), UsedRows(used, count), x.dimensions()[1]};
  int64_t left = rows.count % kTileSide;
  std::vector<uint16_t> last(left ? kTileSide * rows.width : 0);
  std::copy_n(rows.x + (rows.count - left) * rows.width, left * rows.width, last.data());
  std::vector<Projection> projections;
  std::vector<std::pair<int, int64_t>> tasks;  // projection and its first output tile
  std::vector<int64_t> costs;
  for (size_t i = 0; i < args.size(); ++i) {
    auto weights = args.get<U16>(i).value();
    auto sizes = weights.dimensions();
    int64_t of_layer = sizes[1] * sizes[2] * kTileNumbers;
    projections.push_back({weights.typed_data() + layer.typed_data()[0] * of_layer, sizes[1],
                           rets.get<F32>(i).value()->typed_data()});
    for (int64_t column = 0; column < sizes[1]; column += 2) {
      tasks.push_back({i, column});
      costs.push_back(2 * kTileSide * rows.width * ((rows.count + 2 * kTileSide - 1) / (2 * kTileSide)));
    }
  }
  Parallel(pool.num_threads(), costs, [&](int begin, int end) {
    Tiles tiles;
    for (int i = begin; i < end; ++i) {
      const Projection& p = projections[tasks[i].first];
      int64_t column = tasks[i].second;
      int64_t columns = std::min<int64_t>(2, p.column_tiles - column), stride = p.column_tiles * kTileSide;
      auto multiply = columns == 2 ? MultiplyColumns<2> : MultiplyColumns<1>;
      float* y = p.y + column * kTileSide;
      multiply(rows, last.data(), p.weights + column * kTileSide * rows.width, y, stride);
      FillRest(y, rows.count, count, columns * kTileSide, stride);
    }
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit");
#endif
}

#ifdef PLORA_INT8_UNIT

// Weights [layers, O / 16, I / 64, 1024] of one projection with their scales, and where its results go.
struct Int8Projection {
  const int8_t* weights;  // of this layer
  const float* scales;
  int64_t column_tiles;
  float* y;
};

// x [count, width] as digits, in memory that this thread keeps. `largest` is by row, or empty.
template <typename T>
DigitRows Split(int threads, const T* x, int64_t count, int64_t width, const F32& largest) {
  thread_local std::vector<int8_t> digits;
  thread_local std::vector<float> scales;
  int64_t row_tiles = (count + kTileSide - 1) / kTileSide;
  if (digits.size() < size_t(row_tiles * kTileSide * width * kDigits)) digits.resize(row_tiles * kTileSide * width * kDigits);
  if (scales.size() < size_t(count)) scales.resize(count);
  DigitRows rows{digits.data(), scales.data(), count, width};
  const float* given = largest.element_count() ? largest.typed_data() : nullptr;
  int8_t* into = digits.data();
  float* steps = scales.data();
  Parallel(threads, std::vector<int64_t>(count, width), [=](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const T* own = x + row * width;
      steps[row] = SplitRow(own, width, given ? given[row] : LargestMagnitude(own, width),
                            into + row / kTileSide * kTileSide * width * kDigits, row % kTileSide);
    }
  });
  return rows;
}

#endif

ffi::Error Int8ProductsImpl(ffi::ThreadPool pool, I32 layer, I32 used, ffi::AnyBuffer x, F32 largest,
                            ffi::RemainingArgs args, ffi::RemainingRets rets) {
#ifdef PLORA_INT8_UNIT
  int64_t all = x.dimensions()[0], count = UsedRows(used, all), width = x.dimensions()[1];
  int threads = pool.num_threads();
  DigitRows rows = x.element_type() == ffi::BF16
                       ? Split(threads, reinterpret_cast<const uint16_t*>(x.untyped_data()), count, width, largest)
                       : Split(threads, reinterpret_cast<const uint32_t*>(x.untyped_data()), count, width, largest);
  std::vector<Int8Projection> projections;
  std::vector<std::pair<int, int64_t>> tasks;  // projection and its first output tile
  std::vector<int64_t> costs;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto weights = args.get<S8>(2 * i).value();
    auto scales = args.get<F32>(2 * i + 1).value();
    int64_t column_tiles = weights.dimensions()[1], at = layer.typed_data()[0];
    projections.push_back({weights.typed_data() + at * column_tiles * kTileSide * width,
                           scales.typed_data() + at * column_tiles * kTileSide, column_tiles,
                           rets.get<F32>(i).value()->typed_data()});
    for (int64_t column = 0; column < column_tiles; column += 2) {
      tasks.push_back({i, column});
      costs.push_back(2 * kTileSide * width * ((count + 2 * kTileSide - 1) / (2 * kTileSide)));
    }
  }
  Parallel(threads, costs, [&](int begin, int end) {
    Tiles tiles;
    for (int i = begin, next; i < end; i = next) {
      const Int8Projection& p = projections[tasks[i].first];
      for (next = i + 1; next < end && tasks[next].first == tasks[i].first;) ++next;
      int64_t column = tasks[i].second, columns = std::min(p.column_tiles, column + 2 * (next - i)) - column;
      float* y = p.y + column * kTileSide;
      MultiplyInt8(rows, p.weights + column * kTileSide * width, p.scales + column * kTileSide, columns, y,
                   p.column_tiles * kTileSide);
      FillRest(y, count, all, columns * kTileSide, p.column_tiles * kTileSide);
    }
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit for int8");
#endif
}

}  // namespace
}  // namespace plora

using namespace plora;

// 1 when this process may use the matrix unit.
extern "C" int plora_matrix_unit() { return MatrixUnit(); }

// The same for int8.
extern "C" int plora_int8_unit() {
#ifdef PLORA_INT8_UNIT
  return MatrixUnit();
#else
  return 0;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_int8_products, Int8ProductsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_products, ProductsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<Bf16>()
                                  .RemainingArgs()
                                  .RemainingRets());
