// What no plan of a part can undercut at given prices: `least_sums` of folded.py and `lower_bounds` of prices.py.

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "planner_decision.h"

namespace plora::planner {
namespace {

// [U] sums over rows of the least of values [M, S] in each of U sets of columns; in any column if not active.
std::vector<double> LeastSums(int64_t rows, int64_t columns, const double* values, const uint8_t* active,
                              const std::vector<const uint8_t*>& sets) {
  int64_t u = sets.size();
  std::vector<double> barred(columns * u), least(u), sums(u, 0.0);
  for (int64_t set = 0; set < u; ++set) {
    for (int64_t s = 0; s < columns; ++s) barred[s * u + set] = sets[set][s] ? 0.0 : kInf;
  }
  double idle = 0.0;
  for (int64_t row = 0; row < rows; ++row, values += columns) {
    if (!active[row]) {
      idle += *std::min_element(values, values + columns);
      continue;
    }
    std::fill_n(least.data(), u, kInf);
    for (int64_t s = 0; s < columns; ++s) {
      const double* bar = barred.data() + s * u;
      for (int64_t set = 0; set < u; ++set) least[set] = std::min(least[set], values[s] + bar[set]);
    }
    for (int64_t set = 0; set < u; ++set) sums[set] += least[set];
  }
  for (double& sum : sums) sum += idle;
  return sums;
}

// Seconds of KV by an attention strategy, with the memory that it takes; `whole`: all of it is on the device.
double KvBound(const Folded& f, const double* prices, double joint, int64_t attention, bool whole) {
  double pool = Dot(f.kv_pool + attention * f.places, prices, f.places), device = Dot(f.kv_device, prices, f.places);
  double bend = std::min(std::max(f.current_fraction, f.min_fraction), f.most_fraction), least = kInf;
  for (double p : {whole ? 1.0 : f.min_fraction, whole ? 1.0 : bend, whole ? 1.0 : f.most_fraction}) {
    double moved = f.kv_move_s * std::max(0.0, p - f.current_fraction);
    least = std::min(least, pool + p * (device - pool + joint * f.kv_bytes) + moved);
  }
  return (whole ? 0.0 : f.kv_serial[attention]) + least;
}

}  // namespace
}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

void plora_plan_least_sums(int64_t rows, int64_t columns, int64_t sets, const double* values, const uint8_t* active,
                           const uint8_t* in_set, double* sums) {
  std::vector<const uint8_t*> each(sets);
  for (int64_t set = 0; set < sets; ++set) each[set] = in_set + set * columns;
  std::vector<double> found = LeastSums(rows, columns, values, active, each);
  std::copy(found.begin(), found.end(), sums);
}

// [U] for nodes: attention [U], columns [U, S], whether all KV is on the device [U]. `total` [M, S] are costs at prices
// [K] of places, with bytes at `joint` and `adapters`. Without what no decision changes.
void plora_plan_lower_bounds(const Folded* folded, const double* prices, double joint, double adapters,
                             const double* total, int64_t nodes, const int64_t* attention, const uint8_t* columns,
                             const uint8_t* whole, double* bounds) {
  const Folded& f = *folded;
  std::map<std::vector<uint8_t>, int64_t> index;
  std::map<std::pair<int64_t, bool>, double> ways;
  std::vector<const uint8_t*> sets;
  std::vector<int64_t> set_of(nodes);
  double common = Dot(prices, f.base, f.places) - joint * f.budget;
  if (f.adapter_limit < kInf) common -= adapters * f.adapter_limit;
  for (int64_t u = 0; u < nodes; ++u) {
    const uint8_t* set = columns + u * f.columns;
    auto [found, is_new] = index.try_emplace(std::vector<uint8_t>(set, set + f.columns), sets.size());
    if (is_new) sets.push_back(set);
    set_of[u] = found->second;
  }
  std::vector<double> of_set = LeastSums(f.rows, f.columns, total, f.active, sets);
  for (int64_t s = 0; f.fixed && s < f.columns; ++s) {
    double charge = Dot(f.fixed + s * f.places, prices, f.places) + f.fixed_serial[s];
    for (size_t set = 0; set < sets.size(); ++set) of_set[set] += sets[set][s] ? charge : 0.0;
  }
  for (int64_t u = 0; u < nodes; ++u) {
    auto [way, is_new] = ways.try_emplace({attention[u], whole[u] != 0}, 0.0);
    if (is_new) way->second = KvBound(f, prices, joint, attention[u], whole[u] != 0);
    bounds[u] = common + way->second + of_set[set_of[u]];
  }
}

}  // extern "C"
