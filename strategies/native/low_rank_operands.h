// Operands and results of the functions of XLA that apply adapters, and what those that attend share with them.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "low_rank.h"
#include "rows.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace plora {

namespace ffi = xla::ffi;

using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using Any = ffi::AnyBuffer;

template <typename T>
const T* Numbers(const Any& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Calls f with a null pointer of the type of each buffer's raw numbers.
template <typename F>
void ForTypes(const Any& pages, const Any& x, F f) {
  bool half = pages.element_type() == ffi::U16, half_x = x.element_type() == ffi::BF16;
  const uint16_t* h = nullptr;
  const uint32_t* w = nullptr;
  half ? (half_x ? f(h, h) : f(h, w)) : (half_x ? f(w, h) : f(w, w));
}
// The same of adapters, whose numbers in the pages are integers when `int8`.
template <typename F>
void ForAdapterTypes(const Any& pages, bool int8, const Any& x, F f) {
  const int8_t* number = nullptr;
  ForTypes(pages, x, [&](auto of_pages, auto of_x) { int8 ? f(number, of_x) : f(of_pages, of_x); });
}

// A or B of a layer, whose numbers may be narrower than the pages' raw ones.
template <typename T>
Side<T> SideOf(const Any& pages, const I32& layer, const I32& ranks, const I32& tables, Ints widths) {
  auto sizes = pages.dimensions();
  const int64_t width = sizes[2] * (pages.element_type() == ffi::U16 ? 2 : 4) / sizeof(T);
  const T* first = Numbers<T>(pages) + layer.typed_data()[0] * sizes[1] * width;
  return {first, width, tables.typed_data(), tables.dimensions()[1], ranks.typed_data(), widths};
}

// The results' arrays, of floats or of raw bfloat16, with zeros where no piece will write.
template <typename Y>
std::vector<Y*> Results(ffi::RemainingRets& rets, const I32& owner, const I32& ranks, Ints group, int max_rank) {
  int64_t adapters = ranks.dimensions()[0], projections = ranks.dimensions()[1];
  std::vector<Y*> y;
  for (size_t at = 0; at < group.size(); ++at) {
    auto result = rets.get<Any>(at).value();
    int64_t tokens = result->dimensions()[0], width = result->dimensions()[1];
    Y* rows = static_cast<Y*>(result->untyped_data());
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t who = owner.typed_data()[t];
      bool used = who >= 0 && who < adapters && ranks.typed_data()[who * projections + group[at]] > 0 && max_rank > 0;
      if (!used) std::memset(rows + t * width, 0, width * sizeof(Y));
    }
    y.push_back(rows);
  }
  return y;
}

// What `Results` gives for results in float32 or bfloat16: pieces write float32, and `Finish` rounds it.
class DeltaResults {
 public:
  DeltaResults(ffi::RemainingRets& rets, const I32& owner, const I32& ranks, Ints group, int max_rank)
      : rets_(rets), owner_(owner.typed_data()), adapters_(ranks.dimensions()[0]) {
    if (group.size() == 0 || rets.get<Any>(0).value()->element_type() == ffi::F32) {
      y_ = Results<float>(rets, owner, ranks, group, max_rank);
      return;
    }
    constexpr int kRoomOfResults = 7;
    int64_t numbers = 0;
    for (size_t at = 0; at < group.size(); ++at) numbers += rets.get<Any>(at).value()->element_count();
    float* room = Scratch<float, kRoomOfResults>(numbers);
    for (size_t at = 0; at < group.size(); ++at) {
      y_.push_back(room);
      room += rets.get<Any>(at).value()->element_count();
    }
    // Rows of adapters that do not change a projection are written by no piece.
    for (size_t at = 0; at < group.size(); ++at) {
      const int64_t projections = ranks.dimensions()[1], width = rets.get<Any>(at).value()->dimensions()[1];
      for (int64_t t = 0; t < owner.dimensions()[0]; ++t) {
        if (Owned(t) && (max_rank <= 0 || ranks.typed_data()[owner_[t] * projections + group[at]] <= 0)) {
          std::memset(y_[at] + t * width, 0, width * sizeof(float));
        }
      }
    }
    narrow_ = true;
  }
  const std::vector<float*>& Arrays() const { return y_; }
  void Finish(int threads) const {
    for (size_t at = 0; narrow_ && at < y_.size(); ++at) {
      auto result = rets_.get<Any>(at).value();
      const int64_t tokens = result->dimensions()[0], width = result->dimensions()[1];
      Parallel(threads, std::vector<int64_t>(tokens, width), [&](int begin, int end) {
        for (int64_t t = begin; t < end; ++t) {
          auto* to = static_cast<uint16_t*>(result->untyped_data()) + t * width;
          if (Owned(t)) {
            const float* from = y_[at] + t * width;
            ForParts(width, [&](int64_t i, auto count) { StorePart(to + i, LoadPart(from + i, count), count); });
          } else {
            std::memset(to, 0, width * sizeof(uint16_t));
          }
        }
      });
    }
  }

 private:
  bool Owned(int64_t t) const { return owner_[t] >= 0 && owner_[t] < adapters_; }

  ffi::RemainingRets& rets_;
  const int32_t* owner_;
  const int64_t adapters_;
  std::vector<float*> y_;
  bool narrow_ = false;
};

// The arrays of sums, which results share with operands, from the row of the first token on.
inline std::vector<float*> RowsFrom(ffi::RemainingRets& sums, Ints group, int64_t first) {
  std::vector<float*> y;
  for (size_t at = 0; at < group.size(); ++at) {
    auto sum = sums.get<F32>(at).value();
    y.push_back(sum->typed_data() + first * sum->dimensions()[1]);
  }
  return y;
}

// Operands of shrink, expand, delta and add, as jax.ffi hands them over.
inline auto ShrinkOperands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<F32>()
      .Arg<I32>()
      .Ret<Any>()
      .Attr<Ints>("group")
      .Attr<bool>("int8")
      .Attr<Ints>("a_widths");
}
inline auto ExpandOperands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<I32>()
      .RemainingRets()
      .Attr<Ints>("group")
      .Attr<bool>("int8")
      .Attr<Ints>("b_widths");
}
inline auto DeltaOperands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<F32>()
      .Arg<I32>()
      .Arg<I32>()
      .RemainingRets()
      .Attr<Ints>("group")
      .Attr<bool>("int8")
      .Attr<Ints>("a_widths")
      .Attr<Ints>("b_widths")
      .Attr<int64_t>("max_rank");
}
inline auto AddOperands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<I32>()
      .Arg<F32>()
      .Arg<I32>()
      .Arg<I32>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<Ints>("group")
      .Attr<bool>("int8")
      .Attr<Ints>("a_widths")
      .Attr<Ints>("b_widths")
      .Attr<int64_t>("max_rank")
      .Attr<int64_t>("first");
}

}  // namespace plora
