// Writes the keys and values of a step's tokens into their pages, in place, as a function of XLA.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "int8_pages.h"
#include "rows.h"
#include "threads.h"
#include "used_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace plora {
namespace {

using I32 = ffi::Buffer<ffi::S32>;

// Where a row goes: the keys or values of its head in a page, and which of the page's tokens it is.
struct Place {
  char* part;
  int64_t token, page_tokens;
};

// Copies a row of a head, rounds it to bfloat16, or to int8 beside a scale; `bytes` is what the page has for it.
void CopyRow(const char* from, const Place& to, int64_t bytes) { std::memcpy(to.part + to.token * bytes, from, bytes); }
void RoundRow(const char* from, const Place& to, int64_t bytes) {
  auto numbers = reinterpret_cast<const float*>(from);
  auto rounded = reinterpret_cast<uint16_t*>(to.part + to.token * bytes);
  ForParts(bytes / 2, [&](int64_t i, auto count) { StorePart(rounded + i, LoadPart(numbers + i, count), count); });
}

template <typename X>
void QuantizeRow(const char* from, const Place& to, int64_t bytes) {
  float scale = Quantize(reinterpret_cast<const X*>(from), bytes, reinterpret_cast<int8_t*>(to.part + to.token * bytes));
  std::memcpy(to.part + to.page_tokens * bytes + to.token * sizeof(float), &scale, sizeof(float));
}

// The tokens' keys or values, in rows.
struct KvRows {
  KvRows(const ffi::AnyBuffer& x, int64_t bytes, bool int8)
      : from(static_cast<const char*>(x.untyped_data())), dim(x.dimensions()[2]), wide(ffi::ByteWidth(x.element_type())) {
    write = int8 ? (wide == 2 ? QuantizeRow<uint16_t> : QuantizeRow<float>) : dim * wide == bytes ? CopyRow : RoundRow;
  }
  const char* from;
  int64_t dim, wide;
  void (*write)(const char*, const Place&, int64_t);
};

// Rows of H numbers of a head: tokens [T, K, H], pages [L, P, 2, K, G, H], or as int8_pages.h reads them.
template <bool kInt8>
ffi::Error WriteKvImpl(ffi::ThreadPool pool, ffi::AnyBuffer pages, I32 layer, ffi::AnyBuffer k, ffi::AnyBuffer v,
                       I32 page_of, I32 offset_of, I32 used, ffi::Result<ffi::AnyBuffer> out, int32_t page_tokens) {
  if (out->untyped_data() != pages.untyped_data()) return ffi::Error::Internal("plora_write_kv: the pages were copied");
  int64_t tokens = UsedRows(used, k.dimensions()[0]), heads = k.dimensions()[1], num_pages = pages.dimensions()[1];
  int64_t wide = ffi::ByteWidth(pages.element_type()), bytes = k.dimensions()[2] * (kInt8 ? 1 : wide);
  int64_t part_bytes = pages.dimensions()[2] * wide / (2 * heads);
  const KvRows parts[] = {KvRows(k, bytes, kInt8), KvRows(v, bytes, kInt8)};
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
        const KvRows& rows = parts[part];
        rows.write(rows.from + (t * heads + head) * rows.dim * rows.wide,
                   {to + ((page * 2 + part) * heads + head) * part_bytes, offset, page_tokens}, bytes);
      }
    }
  });
  return ffi::Error::Success();
}

auto WriteKvOperands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Arg<I32>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<I32>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int32_t>("page_tokens");
}

}  // namespace
}  // namespace plora

using namespace plora;

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_write_kv, WriteKvImpl<false>, WriteKvOperands());

XLA_FFI_DEFINE_HANDLER_SYMBOL(plora_int8_write_kv, WriteKvImpl<true>, WriteKvOperands());
