// What strategies/planner/rounding.py and improve.py do between moves, in one call each: levelling, and the best P.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "planner_decision.h"

namespace plora::planner {
namespace {

struct Leaning {
  double key;
  Move move;
};

// What the relaxation said: prices of places [K] and of a byte of adapters, costs of choices at these [M, S], and P.
struct Relaxed {
  const double *prices, *total;
  double adapter_byte, fraction;
};

// Moves rows away from places that are dearer now than they were. A byte that does not fit costs `byte_s`.
void Level(Objective& objective, const Relaxed& relaxed, double byte_s) {
  const Folded& f = objective.f;
  const Decision& d = objective.d;
  std::vector<double> places = objective.Prices();
  for (int64_t k = 0; k < f.places; ++k) places[k] = 0.5 * places[k] + 0.5 * relaxed.prices[k];
  bool over = objective.Fraction(d.bytes) < relaxed.fraction || !objective.Fits();
  double byte = relaxed.adapter_byte * (over ? 1.2 : 0.9);
  std::vector<Leaning> leaning;
  std::vector<double> costs(f.columns);
  for (int64_t row = 0; row < f.rows; ++row) {
    const double* of_row = relaxed.total + row * f.columns;
    for (int64_t s = 0; s < f.columns; ++s) {
      int64_t at = row * f.columns + s;
      costs[s] = Dot(f.Work(row, s), places.data(), f.places) + f.own[at] + byte * f.bytes[at];
      if (std::isinf(of_row[s])) costs[s] = kInf;
    }
    int64_t to = std::min_element(costs.begin(), costs.end()) - costs.begin(), now = d.columns[row];
    double gain = costs[now] - costs[to];
    if (!(gain > 0) || !std::isfinite(gain)) continue;
    double loss = std::max(of_row[to] - of_row[now], 0.0);
    leaning.push_back({loss / gain, {row, to}});
  }
  std::stable_sort(leaning.begin(), leaning.end(), [](const Leaning& a, const Leaning& b) { return a.key < b.key; });
  std::vector<Move> moves(leaning.size());
  std::transform(leaning.begin(), leaning.end(), moves.begin(), [](const Leaning& one) { return one.move; });
  objective.Apply(moves, objective.Ladder(moves, byte_s));
}

// Places of attention's phase as lines in P.
struct Lines {
  std::vector<double> at_zero, slope;

  size_t LongestAt(double p) const {
    size_t best = 0;
    for (size_t i = 1; i < slope.size(); ++i) {
      if (at_zero[i] + p * slope[i] > at_zero[best] + p * slope[best]) best = i;
    }
    return best;
  }
  double Seconds(double p) const { size_t i = LongestAt(p); return at_zero[i] + p * slope[i]; }

  // Tries the ends, and where the largest line is least: by tangents from both sides.
  template <typename F>
  void Bends(double left, double right, double move_s, const F& try_) const {
    try_(left), try_(right);
    for (size_t turn = 0; turn < slope.size(); ++turn) {
      size_t a = LongestAt(left), b = LongestAt(right);
      if (slope[a] + move_s >= 0 || slope[b] + move_s <= 0 || a == b) return;
      double middle = std::min(std::max((at_zero[a] - at_zero[b]) / (slope[b] - slope[a]), left), right);
      size_t at = LongestAt(middle);
      if (at == a || at == b || middle == left || middle == right) return try_(middle);
      (slope[at] + move_s < 0 ? left : right) = middle;
    }
    try_(left), try_(right);
  }
};

// `most`: P at most beside the adapters; nothing changes where it is less than the least.
void BestFraction(Objective& objective, double most) {
  const Folded& f = objective.f;
  Decision& d = objective.d;
  if (most < f.min_fraction) return;
  double fraction = objective.Fraction(d.bytes), wanted = d.wanted, least = kInf;
  double bend = std::min(std::max(f.current_fraction, f.min_fraction), f.most_fraction);
  int64_t best = d.attention;
  std::vector<double> loads(d.loads, d.loads + f.places);
  objective.AddFixed(d.count, loads.data());
  for (d.attention = 0; d.attention < f.attentions; ++d.attention) {
    Lines lines;
    const double* pool = f.kv_pool + d.attention * f.places;
    for (int64_t k = f.kv_first; k < f.kv_end; ++k) {
      lines.at_zero.push_back(loads[k] + pool[k]), lines.slope.push_back(f.kv_device[k] - pool[k]);
    }
    auto try_ = [&](double p) {
      double value = lines.Seconds(p) + objective.KvOwn(p);
      if (value < least) least = value, best = d.attention, wanted = p;
    };
    if (f.min_fraction <= fraction && fraction <= most) try_(fraction);
    if (std::min(bend, most) >= f.min_fraction) lines.Bends(f.min_fraction, std::min(bend, most), 0.0, try_);
    if (most >= bend) lines.Bends(bend, most, f.kv_move_s, try_);
  }
  d.attention = best;
  d.wanted = wanted >= most * (1 - 1e-12) && least < kInf ? f.most_fraction : wanted;  // more, once there is room
}

}  // namespace
}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

double plora_plan_value(const Folded* folded, Decision* decision) {
  return Objective(*folded, *decision, 0.0).Value();
}

void plora_plan_best_fraction(const Folded* folded, Decision* decision, double most) {
  Objective objective(*folded, *decision, 0.0);
  BestFraction(objective, most);
}

void plora_plan_level(const Folded* folded, Decision* decision, const double* prices, const double* total,
                      double adapter_byte, double fraction, double sharpness, double byte_s) {
  Objective objective(*folded, *decision, sharpness);
  Level(objective, {prices, total, adapter_byte, fraction}, byte_s);
}

}  // extern "C"
