// A planning problem and a decision, as strategies/planner/folded.py and decision.py have them, and what moves give.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "planner_sums.h"

namespace plora::planner {

// As FoldedView of planner_calls.py, member by member. M rows, S columns, K places, F phases, A ways to attend.
struct Folded {
  int64_t rows, columns, places, phases, kv_first, kv_end;  // places of attention's phase
  const double *work, *own, *bytes;                         // [M, S, K], [M, S], [M, S]
  const uint8_t *allowed, *active;                          // [M, S], [M]
  const int64_t* home;                                      // [M]
  const double* base;                                       // [K]
  const double *fixed, *fixed_serial;                       // [S, K], [S]; null where nothing is charged
  const int64_t* starts;                                    // [F]
  const double *kv_device, *kv_pool, *kv_serial;            // [K], [A, K], [A]
  int64_t attentions;                                       // A
  double budget, adapter_budget, adapter_limit, kv_budget;  // bytes; infinite where there is no limit
  double slack, kv_slack;                                   // bytes that sums for adapters, for KV may be off by
  double kv_bytes, kv_move_s, current_fraction, min_fraction, most_fraction;

  const double* Work(int64_t row, int64_t column) const { return work + (row * columns + column) * places; }
  int64_t PhaseEnd(int64_t phase) const { return phase + 1 < phases ? starts[phase + 1] : places; }
};

// As DecisionView, member by member.
struct Decision {
  int64_t* columns;  // [M]
  double* loads;     // [K]
  int64_t* count;    // [S]
  int64_t attention;
  double wanted, own, bytes;
};

// A decision with arrays of its own.
struct Kept {
  Kept(const Folded& f, const Decision& d)
      : columns(d.columns, d.columns + f.rows), loads(d.loads, d.loads + f.places), count(d.count, d.count + f.columns),
        attention(d.attention), wanted(d.wanted), own(d.own), bytes(d.bytes) {}

  void GiveTo(Decision* d) const {
    std::copy(columns.begin(), columns.end(), d->columns);
    std::copy(loads.begin(), loads.end(), d->loads);
    std::copy(count.begin(), count.end(), d->count);
    d->attention = attention, d->wanted = wanted, d->own = own, d->bytes = bytes;
  }

  std::vector<int64_t> columns;
  std::vector<double> loads;
  std::vector<int64_t> count;
  int64_t attention;
  double wanted, own, bytes;
};

// Sums of a decision by its columns.
inline void AddUp(const Folded& f, Decision* d) {
  std::copy_n(f.base, f.places, d->loads);
  std::fill_n(d->count, f.columns, 0);
  d->own = d->bytes = 0.0;
  for (int64_t row = 0; row < f.rows; ++row) {
    int64_t column = d->columns[row], at = row * f.columns + column;
    const double* work = f.Work(row, column);
    for (int64_t k = 0; k < f.places; ++k) d->loads[k] += work[k];
    d->own += f.own[at], d->bytes += f.bytes[at];
    d->count[column] += f.active[row];
  }
}

struct Move {
  int64_t row, column;
};

// What values are asked of: the decision, and how soft the longest places are (per second; 0: they alone count).
class Objective {
 public:
  // `sharpness` is relative to the step; 0: none.
  Objective(const Folded& folded, Decision& decision, double sharpness)
      : f(folded), d(decision), sharpness_(sharpness), scratch_(f.places) {}

  // P beside adapters of so many bytes.
  double Fraction(double bytes) const {
    if (f.kv_bytes <= 0) return d.wanted;
    return std::min(std::max((f.budget - bytes) / f.kv_bytes, f.min_fraction), std::max(d.wanted, f.min_fraction));
  }

  // The most P that fits beside the decision's adapters; below the least where they do not fit.
  double MostKv() const {
    if (f.kv_bytes <= 0) return f.most_fraction;
    double room = std::min(f.budget - d.bytes, f.kv_budget), fraction = room / f.kv_bytes;
    bool off = fraction < f.min_fraction && room >= f.min_fraction * f.kv_bytes - f.kv_slack;
    return std::min(f.most_fraction, off ? f.min_fraction : fraction);
  }

  // Seconds of KV that are no load.
  double KvOwn(double fraction) const {
    double moved = f.kv_move_s * std::max(0.0, fraction - f.current_fraction);
    return moved + (fraction < 1 ? f.kv_serial[d.attention] : 0.0);
  }

  double Overshoot(double bytes) const { return std::max(bytes - f.adapter_budget - f.slack, 0.0); }

  // Adds fixed charges of the columns in use to loads [K]; gives what they take besides.
  double AddFixed(const int64_t* count, double* loads) const {
    double serial = 0.0;
    for (int64_t s = 0; f.fixed && s < f.columns; ++s) {
      if (count[s] <= 0) continue;
      for (int64_t k = 0; k < f.places; ++k) loads[k] += f.fixed[s * f.places + k];
      serial += f.fixed_serial[s];
    }
    return serial;
  }

  // Adds KV at P to loads [K].
  void AddKv(double fraction, double* loads) const {
    const double* pool = f.kv_pool + d.attention * f.places;
    for (int64_t k = f.kv_first; k < f.kv_end; ++k) loads[k] += pool[k] + fraction * (f.kv_device[k] - pool[k]);
  }

  // The sum over phases of the longest place; at a rate, where places within about 1 / rate of it count.
  double Longest(const double* loads, double rate) const {
    constexpr double kFaint = -40.0;  // exp of less changes nothing
    double sum = 0.0, near = 1.0;
    for (int64_t phase = 0; phase < f.phases; ++phase) {
      const double *begin = loads + f.starts[phase], *end = loads + f.PhaseEnd(phase);
      double longest = Largest(begin, end - begin), of_phase = 0.0;
      sum += longest;
      double faint = rate > 0 ? longest + kFaint / rate : kInf;
      for (const double* load = begin; rate > 0 && load < end; ++load) {
        if (*load > faint) of_phase += *load < longest ? std::exp(rate * (*load - longest)) : 1.0;
      }
      near *= rate > 0 ? of_phase : 1.0;
    }
    return rate > 0 ? sum + std::log(near) / rate : sum;
  }

  // Seconds of the longest places and of KV; KV is added to the loads.
  double After(double* loads, double bytes, double rate) const {
    double fraction = Fraction(bytes);
    AddKv(fraction, loads);
    return Longest(loads, rate) + KvOwn(fraction);
  }

  // [K], with fixed charges and KV.
  void AllLoads(double* loads) const {
    std::copy_n(d.loads, f.places, loads);
    AddFixed(d.count, loads);
    AddKv(Fraction(d.bytes), loads);
  }

  // The sharpness by second.
  double Rate() {
    if (sharpness_ <= 0) return 0.0;
    AllLoads(scratch_.data());
    return sharpness_ / std::max(Longest(scratch_.data(), 0.0), 1e-30);
  }

  // [K], what a second more of load costs; sums to 1 a phase. Soft where loads are near the largest.
  std::vector<double> Prices() {
    double rate = Rate();  // leaves all loads in scratch_
    std::vector<double> prices(f.places);
    for (int64_t phase = 0; phase < f.phases; ++phase) {
      int64_t begin = f.starts[phase], end = f.PhaseEnd(phase);
      double longest = Largest(scratch_.data() + begin, end - begin), sum = 0.0;
      for (int64_t k = begin; k < end; ++k) sum += prices[k] = std::exp(rate * (scratch_[k] - longest));
      for (int64_t k = begin; k < end; ++k) prices[k] /= sum;
    }
    return prices;
  }

  // The objective, but for what no decision changes.
  double Value() {
    std::copy_n(d.loads, f.places, scratch_.data());
    double serial = AddFixed(d.count, scratch_.data());
    return After(scratch_.data(), d.bytes, 0.0) + d.own + serial;
  }

  bool Fits() const { return Overshoot(d.bytes) <= 0; }

  // How many of the moves, in order, are best taken: prefixes are tried, all short ones and ever longer ones. More
  // bytes than fit cost `byte_price` each.
  int64_t Ladder(const std::vector<Move>& moves, double byte_price) {
    int64_t total = static_cast<int64_t>(moves.size()), best = 0;
    std::vector<int64_t> rungs, count(d.count, d.count + f.columns);
    for (int64_t few : {0, 1, 2, 3, 4, 6, 8, 12, 16}) {
      if (few <= total) rungs.push_back(few);
    }
    for (int64_t part = 1; part <= 16; ++part) rungs.push_back(total * part / 16);
    std::sort(rungs.begin(), rungs.end());
    rungs.erase(std::unique(rungs.begin(), rungs.end()), rungs.end());
    std::vector<double> loads(d.loads, d.loads + f.places);
    double own = 0.0, bytes = d.bytes, least = kInf, rate = Rate();
    int64_t taken = 0;
    for (int64_t rung : rungs) {
      for (; taken < rung; ++taken) {
        Take(moves[taken], loads.data(), &own, &bytes, count.data());
      }
      std::copy_n(loads.data(), f.places, scratch_.data());
      double serial = AddFixed(count.data(), scratch_.data());
      double value = After(scratch_.data(), bytes, rate) + own + serial, over = Overshoot(bytes);
      if (over > 0) value += byte_price == kInf ? kInf : byte_price * over;
      if (value < least) least = value, best = rung;
    }
    return best;
  }

  // Takes the first `number` of the moves.
  void Apply(const std::vector<Move>& moves, int64_t number) {
    for (int64_t i = 0; i < number; ++i) {
      Take(moves[i], d.loads, &d.own, &d.bytes, d.count);
      d.columns[moves[i].row] = moves[i].column;
    }
  }

  const Folded& f;
  Decision& d;

 private:
  // Adds a move from the decision's column to sums.
  void Take(const Move& move, double* loads, double* own, double* bytes, int64_t* count) const {
    int64_t before = d.columns[move.row], here = move.row * f.columns;
    const double *from = f.Work(move.row, before), *to = f.Work(move.row, move.column);
    for (int64_t k = 0; k < f.places; ++k) loads[k] += to[k] - from[k];
    *own += f.own[here + move.column] - f.own[here + before];
    *bytes += f.bytes[here + move.column] - f.bytes[here + before];
    if (f.active[move.row]) ++count[move.column], --count[before];
  }

  double sharpness_;
  std::vector<double> scratch_;
};

}  // namespace plora::planner
