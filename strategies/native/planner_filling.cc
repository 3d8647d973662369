// First plans of strategies/planner/filling.py: columns that are filled adapter by adapter while device memory lasts.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner_decision.h"

namespace plora::planner {
namespace {

class Fillings {
 public:
  // `current` [M] columns that serve rows now, which come first among those that are asked for them.
  Fillings(const Folded& folded, const int64_t* current) : f_(folded), current_(current) {}

  // Everyone in a column of fewest bytes, the cheapest of these; gives the bytes that are left.
  double Smallest(int64_t* columns) const {
    double free = f_.adapter_budget;
    for (int64_t row = 0; row < f_.rows; ++row) {
      double fewest = kInf, cheapest = kInf;
      for (int64_t s = 0; s < f_.columns; ++s) {
        if (f_.allowed[row * f_.columns + s]) fewest = std::min(fewest, Bytes(row, s));
      }
      int64_t best = -1;
      for (int64_t s = 0; s < f_.columns; ++s) {
        if (!f_.allowed[row * f_.columns + s] || Bytes(row, s) > fewest) continue;
        double cost = Cost(row, s);
        if (best < 0 || cost < cheapest) best = s, cheapest = cost;
      }
      columns[row] = best;
      free -= Bytes(row, best);
    }
    return free;
  }

  // Gives rows a column, active ones first, of these those who have it now. Active ones that do not fit get `other`, if
  // that fits; -1: they stay where they are.
  void Give(int64_t column, int64_t other, double free, int64_t* columns) const {
    std::vector<int64_t> rest;
    for (int64_t turn = 0; turn < 4; ++turn) {
      for (int64_t row = 0; row < f_.rows; ++row) {
        if (2 * !f_.active[row] + (current_[row] != column) != turn) continue;
        if (!Try(row, column, &free, columns) && f_.active[row]) rest.push_back(row);
      }
    }
    for (int64_t row : rest) {
      if (other >= 0 && other != column) Try(row, other, &free, columns);
    }
  }

 private:
  double Bytes(int64_t row, int64_t column) const { return f_.bytes[row * f_.columns + column]; }

  double Cost(int64_t row, int64_t column) const {
    const double* work = f_.Work(row, column);
    return Total(work, f_.places) + f_.own[row * f_.columns + column];
  }

  bool Try(int64_t row, int64_t column, double* free, int64_t* columns) const {
    double more = Bytes(row, column) - Bytes(row, columns[row]);
    if (!f_.allowed[row * f_.columns + column] || more > *free) return false;
    *free -= more;
    columns[row] = column;
    return true;
  }

  const Folded& f_;
  const int64_t* current_;
};

}  // namespace
}  // namespace plora::planner

// [1 + S, M] columns: fewest bytes, and for each column everyone in it who fits, active others in `fetch` (-1: as they
// were). Gives the bytes that are free with the fewest.
extern "C" double plora_plan_fillings(const plora::planner::Folded* folded, const int64_t* current, int64_t fetch,
                                      int64_t* columns) {
  plora::planner::Fillings fillings(*folded, current);
  int64_t rows = folded->rows;
  double free = fillings.Smallest(columns);
  for (int64_t column = 0; column < folded->columns; ++column) {
    int64_t* full = columns + (1 + column) * rows;
    std::copy_n(columns, rows, full);
    fillings.Give(column, fetch, free, full);
  }
  return free;
}
