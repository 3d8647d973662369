// Improvements of a decision by moves, in one call each: those of strategies/planner/improve.py, under their names.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "planner_moves.h"

namespace plora::planner {
namespace {

constexpr int64_t kAtOnce = 16;     // single moves tried together
constexpr int64_t kExchanges = 48;  // most promising moves of which all pairs are tried
constexpr double kGain = 1e-9;      // of the step: smaller gains are rounding

// What a single move changes.
struct Change {
  double own, bytes, value;  // `value`: seconds after it, beside what no move changes
};

// Every single move of some rows.
class Singles {
 public:
  Singles(Objective& objective, const int64_t* rows, int64_t number)
      : o_(objective), f_(objective.f), d_(objective.d), rows_(rows), number_(number), base_(f_.places),
        loads_(f_.places), changes_(number * f_.columns) {}

  // Looks at all of them from where the decision stands now.
  void Look() {
    rate_ = o_.Rate();
    std::copy_n(d_.loads, f_.places, base_.data());
    o_.AddFixed(d_.count, base_.data());
    for (int64_t at = 0; at < number_ * f_.columns; ++at) {
      changes_[at] = Loads(base_.data(), at);
      changes_[at].value = o_.After(loads_.data(), d_.bytes + changes_[at].bytes, rate_) + changes_[at].own;
    }
  }

  // Takes one as done in what `With` says.
  void Hold(int64_t at) {
    held_ = Loads(base_.data(), at);
    held_loads_ = loads_;
  }

  // Seconds after another one and that which is held.
  double With(int64_t at) {
    Change change = Loads(held_loads_.data(), at);
    return o_.After(loads_.data(), d_.bytes + held_.bytes + change.bytes, rate_) + held_.own + change.own;
  }

  const Change& operator[](int64_t at) const { return changes_[at]; }
  int64_t Count() const { return number_ * f_.columns; }
  int64_t Row(int64_t at) const { return rows_[at / f_.columns]; }
  Move AsMove(int64_t at) const { return {Row(at), at % f_.columns}; }
  bool Stays(int64_t at) const { return d_.columns[Row(at)] == at % f_.columns; }
  double Still() const { return changes_[d_.columns[rows_[0]]].value; }

 private:
  // loads_ becomes `before` and a move, with charges of columns that come into use and go out of it.
  Change Loads(const double* before, int64_t at) {
    int64_t row = Row(at), column = at % f_.columns, now = d_.columns[row], here = row * f_.columns;
    const double *from = f_.Work(row, now), *to = f_.Work(row, column);
    double* loads = loads_.data();
    for (int64_t k = 0; k < f_.places; ++k) loads[k] = before[k] + (to[k] - from[k]);
    Change change{f_.own[here + column] - f_.own[here + now], f_.bytes[here + column] - f_.bytes[here + now], 0.0};
    if (f_.fixed && f_.active[row] && column != now) {
      if (d_.count[column] == 0) change.own += Charge(column, 1.0, loads);
      if (d_.count[now] == 1) change.own += Charge(now, -1.0, loads);
    }
    return change;
  }

  double Charge(int64_t column, double times, double* loads) const {
    for (int64_t k = 0; k < f_.places; ++k) loads[k] += times * f_.fixed[column * f_.places + k];
    return times * f_.fixed_serial[column];
  }

  Objective& o_;
  const Folded& f_;
  const Decision& d_;
  const int64_t* rows_;
  int64_t number_;
  double rate_ = 0.0;
  std::vector<double> base_, loads_, held_loads_;
  Change held_{};
  std::vector<Change> changes_;
};

// Keeps the `number` first in the order of key(item), of equal ones those that come first.
template <typename T, typename F>
void KeepLeast(std::vector<T>* items, int64_t number, const F& key) {
  auto end = items->begin() + std::min<int64_t>(number, items->size());
  std::partial_sort(items->begin(), end, items->end(), [&](const T& a, const T& b) {
    return key(a) < key(b) || (key(a) == key(b) && a < b);
  });
  items->erase(end, items->end());
}

void Exchanges(Objective& objective, const int64_t* rows, int64_t number, int64_t rounds) {
  Singles singles(objective, rows, number);
  std::vector<int64_t> likely;
  for (int64_t round = 0; round < rounds; ++round) {
    singles.Look();
    likely.clear();
    for (int64_t at = 0; at < singles.Count(); ++at) {
      if (!singles.Stays(at) && std::isfinite(singles[at].value)) likely.push_back(at);
    }
    KeepLeast(&likely, kExchanges, [&](int64_t at) { return singles[at].value; });
    double still = singles.Still(), least = kInf;
    std::vector<Move> moves;
    for (size_t a = 0; a < likely.size(); ++a) {
      singles.Hold(likely[a]);
      for (size_t b = a + 1; b < likely.size(); ++b) {
        if (singles.Row(likely[a]) == singles.Row(likely[b])) continue;
        if (objective.Overshoot(objective.d.bytes + singles[likely[a]].bytes + singles[likely[b]].bytes) > 0) continue;
        double value = singles.With(likely[b]);
        if (value < least) least = value, moves = {singles.AsMove(likely[a]), singles.AsMove(likely[b])};
      }
    }
    if (moves.empty() || least - still > -kGain * std::abs(still)) return;
    int64_t taken = objective.Ladder(moves, kInf);
    if (taken == 0) return;
    objective.Apply(moves, taken);
  }
}

// `barred` [steps] is for how long the row that moves in a step does not go back.
void Walk(Objective& objective, const int64_t* rows, int64_t number, const int64_t* barred, int64_t steps,
            double byte_s) {
  Singles singles(objective, rows, number);
  Decision& d = objective.d;
  Kept best(objective.f, d);
  double best_s = objective.Value();
  std::vector<int64_t> until(singles.Count(), 0);
  for (int64_t step = 0; step < steps; ++step) {
    singles.Look();
    int64_t to = -1;
    double least = kInf;
    for (int64_t at = 0; at < singles.Count(); ++at) {
      if (singles.Stays(at) || until[at] > step) continue;
      double value = singles[at].value + byte_s * objective.Overshoot(d.bytes + singles[at].bytes);
      if (value < least) least = value, to = at;
    }
    if (to < 0) break;
    int64_t here = to / objective.f.columns * objective.f.columns + d.columns[singles.Row(to)];
    until[here] = step + 1 + barred[step];
    objective.Apply({singles.AsMove(to)}, 1);
    double value = objective.Value();
    if (objective.Fits() && value < best_s * (1 - kGain)) best = Kept(objective.f, d), best_s = value;
  }
  best.GiveTo(&d);
}

}  // namespace

void SingleMoves(Objective& objective, const int64_t* rows, int64_t number, int64_t rounds) {
  Singles singles(objective, rows, number);
  int64_t columns = objective.f.columns;
  std::vector<int64_t> best;
  std::vector<Move> moves;
  for (int64_t round = 0; round < rounds; ++round) {
    singles.Look();
    double still = singles.Still(), bytes = objective.d.bytes;
    best.clear(), moves.clear();
    for (int64_t first = 0; first < singles.Count(); first += columns) {
      int64_t to = -1;
      for (int64_t at = first; at < first + columns; ++at) {
        if (objective.Overshoot(bytes + singles[at].bytes) > 0) continue;
        if (to < 0 || singles[at].value < singles[to].value) to = at;
      }
      if (to >= 0 && still - singles[to].value > kGain * std::abs(still)) best.push_back(to);
    }
    KeepLeast(&best, kAtOnce, [&](int64_t at) { return singles[at].value; });
    for (int64_t at : best) moves.push_back(singles.AsMove(at));
    int64_t taken = moves.empty() ? 0 : objective.Ladder(moves, kInf);
    if (taken == 0) return;
    objective.Apply(moves, taken);
  }
}

}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

void plora_plan_single_moves(const Folded* folded, Decision* decision, const int64_t* rows, int64_t number,
                             double sharpness, int64_t rounds) {
  Objective objective(*folded, *decision, sharpness);
  if (number) SingleMoves(objective, rows, number, rounds);
}

void plora_plan_exchanges(const Folded* folded, Decision* decision, const int64_t* rows, int64_t number,
                          double sharpness, int64_t rounds) {
  Objective objective(*folded, *decision, sharpness);
  if (number) Exchanges(objective, rows, number, rounds);
}

void plora_plan_walk(const Folded* folded, Decision* decision, const int64_t* rows, int64_t number,
                       double sharpness, const int64_t* barred, int64_t steps, double byte_s) {
  Objective objective(*folded, *decision, sharpness);
  if (number) Walk(objective, rows, number, barred, steps, byte_s);
}

}  // extern "C"
