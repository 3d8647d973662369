// Sums over the adapters of a planning problem, in one pass each: those of strategies/planner/folded.py, decision.py.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner_decision.h"

namespace plora::planner {
namespace {

// M of N rows of loads [N, S, R], and where each one's work is when it is done in the pool, of H places.
struct Loads {
  int64_t rows, columns, resources, homes;
  const double* load;
  const int64_t *row_of, *home;

  const double* Of(int64_t row, int64_t column) const { return load + (row_of[row] * columns + column) * resources; }
};

// Sums by home [H, R] of the most, and of the least, that rows load in columns allowed to them: one at least.
void Extremes(const Loads& loads, const uint8_t* allowed, double* highest, double* lowest) {
  int64_t r = loads.resources;
  std::vector<double> both(2 * r);
  double *most = both.data(), *least = most + r;
  for (int64_t row = 0; row < loads.rows; ++row) {
    std::fill_n(most, r, 0.0), std::fill_n(least, r, kInf);
    for (int64_t s = 0; s < loads.columns; ++s) {
      if (!allowed[row * loads.columns + s]) continue;
      const double* load = loads.Of(row, s);
      for (int64_t i = 0; i < r; ++i) most[i] = load[i] > most[i] ? load[i] : most[i];
      for (int64_t i = 0; i < r; ++i) least[i] = load[i] < least[i] ? load[i] : least[i];
    }
    double *high = highest + loads.home[row] * r, *low = lowest + loads.home[row] * r;
    for (int64_t i = 0; i < r; ++i) high[i] += most[i], low[i] += least[i];
  }
}

// The seconds [M, S, K] that loads are for places: `shares` [H, K, R] of each resource.
void Work(const Loads& loads, int64_t places, const double* shares, double* work) {
  // Few resources load a place: the first of all places, then the second, and so on; factors 0 where there are no more.
  int64_t r = loads.resources, depth = 0;
  std::vector<std::vector<int64_t>> of_place(places);
  for (int64_t at = 0; at < loads.homes * places * r; ++at) {
    auto& list = of_place[at / r % places];
    if (shares[at] != 0.0 && std::find(list.begin(), list.end(), at % r) == list.end()) list.push_back(at % r);
    depth = std::max<int64_t>(depth, list.size());
  }
  std::vector<int64_t> from(depth * places, 0);
  std::vector<double> factors(loads.homes * depth * places, 0.0);
  for (int64_t k = 0; k < places; ++k) {
    for (size_t d = 0; d < of_place[k].size(); ++d) {
      from[d * places + k] = of_place[k][d];
      for (int64_t home = 0; home < loads.homes; ++home) {
        factors[(home * depth + d) * places + k] = shares[(home * places + k) * r + of_place[k][d]];
      }
    }
  }
  for (int64_t option = 0; option < loads.rows * loads.columns; ++option, work += places) {
    const double* load = loads.Of(option / loads.columns, option % loads.columns);
    const double* factor = factors.data() + loads.home[option / loads.columns] * depth * places;
    if (depth == 0) std::fill_n(work, places, 0.0);
    for (int64_t k = 0; depth > 0 && k < places; ++k) work[k] = load[from[k]] * factor[k];
    for (int64_t d = 1; d < depth; ++d) {
      for (int64_t k = 0; k < places; ++k) work[k] += load[from[d * places + k]] * factor[d * places + k];
    }
  }
}

// Loads [S + ways + 3, P] of places, row by row: charges of columns, the base, ways to serve KV, the most and the least of
// all adapters. Gives the places that can be longer than every other of their phase, and of each the longest at least.
int64_t ThatMatter(int64_t columns, int64_t kinds, int64_t places, const double* loads, const uint8_t* exists,
                   int64_t phases, const int64_t* starts, int64_t* keep) {
  const double *base = loads + columns * places, *most = loads + (kinds - 2) * places, *least = most + places;
  std::vector<double> low(places), high(places);
  for (int64_t p = 0; p < places; ++p) {
    double fewest = kInf, longest = -kInf, charges = 0.0;
    for (const double* way = base + places; way < most; way += places) {
      fewest = std::min(fewest, way[p]), longest = std::max(longest, way[p]);
    }
    for (int64_t s = 0; s < columns; ++s) charges += loads[s * places + p];
    low[p] = exists[p] ? base[p] + least[p] + fewest : -kInf;
    high[p] = base[p] + most[p] + longest + charges;
  }
  int64_t number = 0;
  for (int64_t phase = 0; phase < phases; ++phase) {
    int64_t first = starts[phase], end = phase + 1 < phases ? starts[phase + 1] : places;
    int64_t longest = std::max_element(low.begin() + first, low.begin() + end) - low.begin();
    for (int64_t p = first; p < end; ++p) {
      if (exists[p] && (high[p] > low[longest] || p == longest)) keep[number++] = p;
    }
  }
  return number;
}

// The adapters that prices are found from, 2 * `number` of more: the largest ones, and as many that stand for the others.
void Sample(const Folded& f, int64_t number, int64_t* rows) {
  std::vector<double> seconds(f.rows), bytes(f.rows), size(f.rows);
  for (int64_t row = 0; row < f.rows; ++row) {
    seconds[row] = Total(f.Work(row, 0), f.columns * f.places);
    bytes[row] = Total(f.bytes + row * f.columns, f.columns);
  }
  double all_s = std::max(Total(seconds.data(), f.rows), 1e-300), all_bytes = std::max(Total(bytes.data(), f.rows), 1.0);
  for (int64_t row = 0; row < f.rows; ++row) size[row] = seconds[row] / all_s + bytes[row] / all_bytes;
  std::vector<int64_t> order(f.rows);
  for (int64_t row = 0; row < f.rows; ++row) order[row] = row;
  std::nth_element(order.begin(), order.begin() + number, order.end(), [&](int64_t a, int64_t b) {
    return size[a] > size[b] || (size[a] == size[b] && a < b);
  });
  std::copy_n(order.begin(), number, rows);
  std::sort(order.begin() + number, order.end(), [&](int64_t a, int64_t b) {
    if (f.home[a] != f.home[b]) return f.home[a] < f.home[b];
    return size[a] < size[b] || (size[a] == size[b] && a < b);
  });
  double each = static_cast<double>(f.rows - number) / number;
  for (int64_t i = 0; i < number; ++i) rows[number + i] = order[number + static_cast<int64_t>((i + 0.5) * each)];
}

}  // namespace
}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

void plora_plan_extremes(int64_t rows, int64_t columns, int64_t resources, int64_t homes, const double* load,
                         const int64_t* row_of, const int64_t* home, const uint8_t* allowed, double* highest,
                         double* lowest) {
  Extremes({rows, columns, resources, homes, load, row_of, home}, allowed, highest, lowest);
}

void plora_plan_work(int64_t rows, int64_t columns, int64_t resources, int64_t homes, const double* load,
                     const int64_t* row_of, const int64_t* home, int64_t places, const double* shares, double* work) {
  Work({rows, columns, resources, homes, load, row_of, home}, places, shares, work);
}

int64_t plora_plan_that_matter(int64_t columns, int64_t kinds, int64_t places, const double* loads,
                               const uint8_t* exists, int64_t phases, const int64_t* starts, int64_t* keep) {
  return ThatMatter(columns, kinds, places, loads, exists, phases, starts, keep);
}

void plora_plan_sample(const Folded* folded, int64_t number, int64_t* rows) { Sample(*folded, number, rows); }

void plora_plan_sums(const Folded* folded, Decision* decision) { AddUp(*folded, decision); }

}  // extern "C"
