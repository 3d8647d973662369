// Sums over many numbers, several side by side: the compiler may not reorder sums of doubles itself.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace plora::planner {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kSideBySide = 8, kChains = 4;

// Calls visit(i, lane) for i from 0 to count - 1, so that neighbours go to other lanes of kSideBySide * kChains; the
// loops over lanes are made to be vectors.
template <typename F>
inline void ForLanes(int64_t count, const F& visit) {
  int64_t i = 0;
  for (constexpr int kAll = kSideBySide * kChains; i + kAll <= count; i += kAll) {
    for (int lane = 0; lane < kAll; ++lane) visit(i + lane, lane);
  }
  for (; i + kSideBySide <= count; i += kSideBySide) {
    for (int lane = 0; lane < kSideBySide; ++lane) visit(i + lane, lane);
  }
  for (; i < count; ++i) visit(i, 0);
}

// The sum of of(0) to of(count - 1).
template <typename F>
inline double Sum(int64_t count, const F& of) {
  double lanes[kSideBySide * kChains] = {};
  ForLanes(count, [&](int64_t i, int lane) { lanes[lane] += of(i); });
  for (int half = kSideBySide * kChains / 2; half; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// The largest of `least` and of(0) to of(count - 1).
template <typename F>
inline double Largest(int64_t count, double least, const F& of) {
  double lanes[kSideBySide * kChains];
  std::fill_n(lanes, kSideBySide * kChains, least);
  ForLanes(count, [&](int64_t i, int lane) { lanes[lane] = std::max(lanes[lane], of(i)); });
  return *std::max_element(lanes, lanes + kSideBySide * kChains);
}

inline double Dot(const double* a, const double* b, int64_t count) {
  return Sum(count, [&](int64_t i) { return a[i] * b[i]; });
}

}  // namespace plora::planner
