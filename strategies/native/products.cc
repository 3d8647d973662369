// The matrix unit's products as functions of XLA. See products.h.

#include "products.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;
using U16 = ffi::Buffer<ffi::U16>;

// Weights [layers, O / 16, I / 32, 512] of one projection, and where its results go.
struct Projection {
  const uint16_t* weights;  // of this layer
  int64_t column_tiles;
  float* y;
};

ffi::Error ProductsImpl(ffi::ThreadPool pool, I32 layer, U16 x, ffi::RemainingArgs args, ffi::RemainingRets rets) {
#ifdef __AMX_BF16__
  ProductRows rows{x.typed_data(), x.dimensions()[0], x.dimensions()[1]};
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
                           rets.get<ffi::Buffer<ffi::F32>>(i).value()->typed_data()});
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
      auto multiply = column + 2 <= p.column_tiles ? MultiplyColumns<2> : MultiplyColumns<1>;
      multiply(rows, last.data(), p.weights + column * kTileSide * rows.width, p.y + column * kTileSide,
               p.column_tiles * kTileSide);
    }
  });
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "built without the matrix unit");
#endif
}

}  // namespace
}  // namespace plora

using namespace plora;

// 1 when this process may use the matrix unit.
extern "C" int plora_matrix_unit() { return MatrixUnit(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_products, ProductsImpl,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<I32>().Arg<U16>().RemainingArgs().RemainingRets());
