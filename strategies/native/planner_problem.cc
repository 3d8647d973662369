// Sums over rows of a planning problem as it is given: those of strategies/planner/problem.py, settled.py, folded.py.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner_sums.h"

namespace plora::planner {
namespace {

// Seconds, bytes and homes of N rows, by S columns. Loads have F x R resources, serial time has F phases.
struct Problem {
  int64_t columns, resources, phases, homes;  // D + 1 homes, the last: striped
  const double *load, *serial, *bytes, *move;
  const int64_t* home;  // -1: striped

  int64_t Home(int64_t row) const { return home[row] < 0 ? homes - 1 : home[row]; }
};

inline void AddTo(double* sums, const double* more, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += more[i];
}

}  // namespace
}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

// What M rows take in their columns: loads by home [H, F x R], serial seconds [F], and in `totals` bytes and moves.
void plora_plan_chosen(const Problem* problem, int64_t rows, const int64_t* row_of, const int64_t* column_of,
                       double* loads, double* serial, double* totals) {
  const Problem& p = *problem;
  std::fill_n(loads, p.homes * p.resources, 0.0), std::fill_n(serial, p.phases, 0.0), std::fill_n(totals, 2, 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    int64_t at = row_of[i] * p.columns + column_of[i];
    AddTo(loads + p.Home(row_of[i]) * p.resources, p.load + at * p.resources, p.resources);
    AddTo(serial, p.serial + at * p.phases, p.phases);
    totals[0] += p.bytes[at], totals[1] += p.move[at];
  }
}

// Own seconds [M, S] of rows: serial time and moves, `tie_byte` a byte, less `tie` where they stay; infinite where that
// is not allowed.
void plora_plan_own(const Problem* problem, int64_t rows, const int64_t* row_of, const uint8_t* allowed,
                    const int64_t* current, double tie, double tie_byte, double* own) {
  const Problem& p = *problem;
  for (int64_t i = 0; i < rows; ++i, own += p.columns) {
    for (int64_t s = 0; s < p.columns; ++s) {
      int64_t at = row_of[i] * p.columns + s;
      own[s] = Total(p.serial + at * p.phases, p.phases) + p.move[at] + tie_byte * p.bytes[at];
      if (current[row_of[i]] == s) own[s] -= tie;
      if (!allowed[at]) own[s] = kInf;
    }
  }
}

// Of M rows those whose column takes no memory, and any other is dearer than `sure` times it: their indices, columns
// and costs [S], at prices [H, F x R] of their loads and of a byte. Gives how many there are.
int64_t plora_plan_settled(const Problem* problem, int64_t rows, const int64_t* row_of, const uint8_t* allowed,
                           const int64_t* column_of, const double* prices, double byte, double sure, int64_t* found,
                           int64_t* columns, double* costs) {
  const Problem& p = *problem;
  int64_t number = 0;
  for (int64_t i = 0; i < rows; ++i) {
    int64_t row = row_of[i], column = column_of[row];
    if (p.bytes[row * p.columns + column] > 0) continue;
    double *of_row = costs + number * p.columns, others = kInf;
    for (int64_t s = 0; s < p.columns; ++s) {
      int64_t at = row * p.columns + s;
      double load = Dot(p.load + at * p.resources, prices + p.Home(row) * p.resources, p.resources);
      of_row[s] = load + Total(p.serial + at * p.phases, p.phases) + p.move[at] + byte * p.bytes[at];
      if (!allowed[at]) of_row[s] = kInf;
      if (s != column) others = std::min(others, of_row[s]);
    }
    if (!(others > sure * of_row[column])) continue;
    found[number] = row, columns[number] = column;
    ++number;
  }
  return number;
}

}  // extern "C"
