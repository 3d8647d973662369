// Writes the keys and values of a step's tokens into their pages, in place, as a function of XLA.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;

// Rows of H numbers of a head: tokens [T, K, H], pages [L, P, 2, K, G, H].
ffi::Error WriteKvImpl(ffi::ThreadPool pool, ffi::AnyBuffer pages, I32 layer, ffi::AnyBuffer k, ffi::AnyBuffer v,
                       I32 page_of, I32 offset_of, ffi::Result<ffi::AnyBuffer> out, int32_t page_tokens) {
  if (out->untyped_data() != pages.untyped_data()) return ffi::Error::Internal("plora_write_kv: the pages were copied");
  int64_t tokens = k.dimensions()[0], heads = k.dimensions()[1], num_pages = pages.dimensions()[1];
  int64_t bytes = tokens ? k.size_bytes() / (tokens * heads) : 0;
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t page = page_of.typed_data()[t], offset = offset_of.typed_data()[t];
    if (page < 0 || page >= num_pages || offset < 0 || offset >= page_tokens) {
      return ffi::Error::InvalidArgument("plora_write_kv: token " + std::to_string(t) + " goes to page " +
                                         std::to_string(page) + ", offset " + std::to_string(offset) + ", of " +
                                         std::to_string(num_pages) + " pages of " + std::to_string(page_tokens));
    }
  }
  int64_t first_page = static_cast<int64_t>(layer.typed_data()[0]) * num_pages;
  char* to = static_cast<char*>(out->untyped_data());
  // A thread has whole heads of keys or of values, so tokens that go to one place, as padding does, go there in order.
  std::vector<int64_t> costs(2 * heads, tokens * bytes);
  Parallel(pool.num_threads(), costs, [&](int begin, int end) {
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t page = first_page + page_of.typed_data()[t], offset = offset_of.typed_data()[t];
      for (int task = begin; task < end; ++task) {
        int64_t part = task / heads, head = task % heads;
        const char* from = static_cast<const char*>((part ? v : k).untyped_data()) + (t * heads + head) * bytes;
        std::memcpy(to + (((page * 2 + part) * heads + head) * page_tokens + offset) * bytes, from, bytes);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_write_kv, WriteKvImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("page_tokens"));
