// Products with weights of 4 bits as a function of XLA. See block_products.h.

#include "block_products.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "threads.h"
#include "used_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;
using F32 = ffi::Buffer<ffi::F32>;

#ifdef PLORA_BLOCK_PRODUCTS

// x [count, width] as integers by block, in memory that this thread keeps.
template <typename T>
BlockRows Quantize(int threads, const T* x, int64_t count, int64_t width) {
  thread_local std::vector<int8_t> values;
  thread_local std::vector<float> numbers;
  const int64_t blocks = width / kBlockInputs, room = (count + kTileSide - 1) / kTileSide * kTileSide;
  if (values.size() < size_t(room * width)) values.resize(room * width);
  if (numbers.size() < size_t(2 * room * blocks)) numbers.resize(2 * room * blocks);
  const BlockRows rows{values.data(), numbers.data(), numbers.data() + room * blocks, count, width};
  Parallel(threads, std::vector<int64_t>(count, width), [=](int begin, int end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t at = rows.At(row, block);
        QuantizeBlock(x + row * width + block * kBlockInputs, rows.values + at * kBlockInputs, rows.scales + at,
                      rows.sums + at);
      }
    }
  });
  return rows;
}

#endif

// Weights [layers, O / 16, I / 32, 320] of one projection, and where its results go.
struct BlockProjection {
  const uint8_t* weights;  // of this layer
  int64_t columns;
  float* y;
};

ffi::Error BlockProductsImpl(ffi::ThreadPool pool, I32 layer, I32 used, ffi::AnyBuffer x, ffi::RemainingArgs args,
                             ffi::RemainingRets rets) {
#ifdef PLORA_BLOCK_PRODUCTS
  const int64_t all = x.dimensions()[0], count = UsedRows(used, all), width = x.dimensions()[1];
  const int64_t of_column = width / kBlockInputs * kBlockTileBytes;
  const int threads = pool.num_threads();
  BlockRows rows = x.element_type() == ffi::BF16
                       ? Quantize(threads, reinterpret_cast<const uint16_t*>(x.untyped_data()), count, width)
                       : Quantize(threads, reinterpret_cast<const uint32_t*>(x.untyped_data()), count, width);
  std::vector<BlockProjection> projections;
  std::vector<std::pair<int, int64_t>> tasks;  // projection and its tile of outputs
  for (size_t i = 0; i < rets.size(); ++i) {
    auto weights = args.get<U8>(i).value();
    const int64_t columns = weights.dimensions()[1];
    projections.push_back({weights.typed_data() + layer.typed_data()[0] * columns * of_column, columns,
                           rets.get<F32>(i).value()->typed_data()});
    for (int64_t column = 0; column < columns; ++column) tasks.push_back({i, column});
  }
  const std::vector<int64_t> costs(tasks.size(), kLanes * width * std::max<int64_t>(count, 1));
  Parallel(threads, costs, [&](int begin, int end) {
#ifdef PLORA_BLOCK_TILES
    std::optional<Tiles> tiles;
    if (MatrixUnit()) tiles.emplace(kBlockInputs);
#endif
    for (int i = begin; i < end; ++i) {
      const BlockProjection& p = projections[tasks[i].first];
      const int64_t column = tasks[i].second, stride = p.columns * kLanes;
      float* y = p.y + column * kLanes;
      MultiplyBlockColumn(rows, p.weights + column * of_column, y, stride);
      for (int64_t row = count; row < all; ++row) std::fill_n(y + row * stride, kLanes, 0.0f);
    }
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without products of 8-bit integers");
#endif
}

}  // namespace
}  // namespace plora

using namespace plora;

// 1 when this processor has the instructions.
extern "C" int plora_block_unit() {
#ifdef PLORA_BLOCK_PRODUCTS
  return 1;
#else
  return 0;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_block_products, BlockProductsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());
