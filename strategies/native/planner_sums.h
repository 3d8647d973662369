// Sums over many numbers, several side by side: the compiler may not reorder sums of doubles itself.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
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

constexpr int kWide = kSideBySide;
using Wide = double __attribute__((vector_size(kWide * sizeof(double))));

inline Wide Loaded(const double* from) {
  Wide wide;
  std::memcpy(&wide, from, sizeof wide);
  return wide;
}

inline double Total(const Wide& wide) {
  return ((wide[0] + wide[4]) + (wide[2] + wide[6])) + ((wide[1] + wide[5]) + (wide[3] + wide[7]));
}

// The sum of a few numbers.
inline double Total(const double* numbers, int64_t count) {
  Wide sums = {};
  double rest = 0.0;
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) sums += Loaded(numbers + i);
  for (; i < count; ++i) rest += numbers[i];
  return rest + Total(sums);
}

// Quick for few numbers too, so it has no more lanes than it needs.
inline double Dot(const double* a, const double* b, int64_t count) {
  Wide sums[kChains] = {};
  double rest = 0.0;
  int64_t i = 0;
  for (; i + kChains * kWide <= count; i += kChains * kWide) {
    for (int c = 0; c < kChains; ++c) sums[c] += Loaded(a + i + c * kWide) * Loaded(b + i + c * kWide);
  }
  for (; i + kWide <= count; i += kWide) sums[0] += Loaded(a + i) * Loaded(b + i);
  for (; i < count; ++i) rest += a[i] * b[i];
  return rest + Total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The largest of a few numbers, one at least; quicker than std::max_element, which knows where it is.
inline double Largest(const double* numbers, int64_t count) {
  double lanes[kWide], most = numbers[0];
  int64_t i = 0;
  if (count >= kWide) {
    std::copy_n(numbers, kWide, lanes);
    for (i = kWide; i + kWide <= count; i += kWide) {
      for (int lane = 0; lane < kWide; ++lane) lanes[lane] = std::max(lanes[lane], numbers[i + lane]);
    }
    for (double lane : lanes) most = std::max(most, lane);
  }
  for (; i < count; ++i) most = std::max(most, numbers[i]);
  return most;
}

}  // namespace plora::planner
