// Writes the keys and values of a step's tokens into their pages, in place, as a function of XLA.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "rows.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;

// Copies a row of a head, or rounds it to bfloat16; `bytes` is what the page has for it.
void CopyRow(const char* from, char* to, int64_t bytes) { std::memcpy(to, from, bytes); }
void RoundRow(const char* from, char* to, int64_t bytes) {
  auto numbers = reinterpret_cast<const float*>(from);
  auto rounded = reinterpret_cast<uint16_t*>(to);
  ForParts(bytes / 2, [&](int64_t i, auto count) { StorePart(rounded + i, LoadPart(numbers + i, count), count); });
}

// The tokens' keys or values, in rows.
struct Rows {
  Rows(const ffi::AnyBuffer& x, int64_t bytes)
      : from(static_cast<const char*>(x.untyped_data())), dim(x.dimensions()[2]), wide(ffi::ByteWidth(x.element_type())) {
    write = dim * wide == bytes ? CopyRow : RoundRow;
  }
  const char* from;
  int64_t dim, wide;
  void (*write)(const char*, char*, int64_t);
};

// Rows of H numbers of a head: tokens [T, K, H], pages [L, P, 2, K, G, H].
ffi::Error WriteKvImpl(ffi::ThreadPool pool, ffi::AnyBuffer pages, I32 layer, ffi::AnyBuffer k, ffi::AnyBuffer v,
                       I32 page_of, I32 offset_of, ffi::Result<ffi::AnyBuffer> out, int32_t page_tokens) {
  if (out->untyped_data() != pages.untyped_data()) return ffi::Error::Internal("plora_write_kv: the pages were copied");
  int64_t tokens = k.dimensions()[0], heads = k.dimensions()[1], num_pages = pages.dimensions()[1];
  int64_t bytes = k.dimensions()[2] * ffi::ByteWidth(pages.element_type());
  const Rows parts[] = {Rows(k, bytes), Rows(v, bytes)};
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
        const Rows& rows = parts[part];
        rows.write(rows.from + (t * heads + head) * rows.dim * rows.wide,
                   to + (((page * 2 + part) * heads + head) * page_tokens + offset) * bytes, bytes);
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
