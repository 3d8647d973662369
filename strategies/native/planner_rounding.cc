// From shares to strategies, and the best P: strategies/planner/rounding.py, and of improve.py what these need.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "planner_moves.h"

namespace plora::planner {
namespace {

constexpr double kLevels[] = {200.0, 500.0, 1000.0, 3000.0};  // sharpness of levelling, round by round
constexpr double kSharpness[] = {200.0, 1000.0, 0.0};         // the same of mending
constexpr int64_t kClose = 40, kMendRounds = 4;               // adapters nearest to a tie, which are mended
constexpr double kDear = 1e30, kWorth = 1e-6;                 // seconds of a column nobody should have; least gain
constexpr int kDraws = 2;
constexpr double kGolden = 0.6180339887498949;

// A move, and what says when it comes.
struct Leaning {
  double key;
  Move move;
};

// What the relaxation said: prices of places [K] and of a byte of adapters, costs of choices at these [M, S], and P.
struct Relaxed {
  const double *prices, *total;
  double adapter_byte, fraction;
};

std::vector<Move> InOrder(std::vector<Leaning>* leaning) {
  std::stable_sort(leaning->begin(), leaning->end(), [](const Leaning& a, const Leaning& b) { return a.key < b.key; });
  std::vector<Move> moves(leaning->size());
  std::transform(leaning->begin(), leaning->end(), moves.begin(), [](const Leaning& one) { return one.move; });
  return moves;
}

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
  std::vector<Move> moves = InOrder(&leaning);
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

// Nothing changes where the adapters do not leave room for the least P.
void BestFraction(Objective& objective) {
  const Folded& f = objective.f;
  Decision& d = objective.d;
  double most = objective.MostKv();
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

// Moves adapters to columns of fewer bytes by the least cost a byte, until the decision is within all limits.
void MakeFit(Objective& objective, const double* total, double adapter_byte) {
  const Folded& f = objective.f;
  Decision& d = objective.d;
  for (int64_t turn = 0; turn < f.columns && d.bytes > f.adapter_budget; ++turn) {
    std::vector<Leaning> leaning;
    for (int64_t row = 0; row < f.rows; ++row) {
      int64_t here = row * f.columns, now = here + d.columns[row];
      Leaning best{kInf, {row, 0}};
      for (int64_t at = here; at < here + f.columns; ++at) {
        double freed = f.bytes[now] - f.bytes[at];
        if (!(freed > 0) || !f.allowed[at]) continue;
        double rate = (total[at] - total[now] + adapter_byte * freed) / freed;
        if (rate < best.key) best = {rate, {row, at - here}};
      }
      if (std::isfinite(best.key)) leaning.push_back(best);
    }
    std::vector<Move> moves = InOrder(&leaning);
    double over = d.bytes - f.adapter_budget;
    int64_t number = 0, most = moves.size();
    for (double freed = 0.0; number < most && freed < over; ++number) {
      int64_t here = moves[number].row * f.columns;
      freed += f.bytes[here + d.columns[moves[number].row]] - f.bytes[here + moves[number].column];
    }
    objective.Apply(moves, number);
  }
}

// Takes everyone to its cheapest column at costs [M, S], the largest relative gains first, as far as that is best.
void TakeCheapest(Objective& objective, const double* total) {
  const Folded& f = objective.f;
  std::vector<Leaning> leaning;
  for (int64_t row = 0; row < f.rows; ++row) {
    const double* of_row = total + row * f.columns;
    int64_t to = std::min_element(of_row, of_row + f.columns) - of_row;
    double now = of_row[objective.d.columns[row]];
    if (!std::isfinite(now)) now = kDear;
    double gain = (now - of_row[to]) / std::max(std::abs(now), 1e-30);
    if (gain > kWorth) leaning.push_back({-gain, {row, to}});
  }
  std::vector<Move> moves = InOrder(&leaning);
  if (!moves.empty()) objective.Apply(moves, objective.Ladder(moves, kInf));
}

// The rows nearest to a tie between strategies at costs [M, S]: `number` of them, or all.
std::vector<int64_t> Closest(const Folded& f, const int64_t* columns, const double* total, int64_t number) {
  std::vector<int64_t> rows(f.rows);
  for (int64_t row = 0; row < f.rows; ++row) rows[row] = row;
  if (f.rows <= number) return rows;
  std::vector<double> closeness(f.rows, kInf);
  for (int64_t row = 0; row < f.rows; ++row) {
    const double* of_row = total + row * f.columns;
    double now = std::isfinite(of_row[columns[row]]) ? of_row[columns[row]] : 0.0;
    for (int64_t s = 0; s < f.columns; ++s) {
      if (s != columns[row]) closeness[row] = std::min(closeness[row], of_row[s] - now);
    }
    closeness[row] /= std::max(std::abs(now), 1e-30);
  }
  std::nth_element(rows.begin(), rows.begin() + number, rows.end(), [&](int64_t a, int64_t b) {
    return closeness[a] < closeness[b] || (closeness[a] == closeness[b] && a < b);
  });
  rows.resize(number);
  return rows;
}

// The rows that would relieve the busiest places most by leaving: `number` of them, or all.
std::vector<int64_t> Pressing(Objective& objective, int64_t number) {
  const Folded& f = objective.f;
  std::vector<double> places = objective.Prices();
  std::vector<Leaning> leaning(f.rows);
  for (int64_t row = 0; row < f.rows; ++row) {
    double now = 0.0, least = kInf;
    for (int64_t s = 0; s < f.columns; ++s) {
      double cost = Dot(f.Work(row, s), places.data(), f.places) + f.own[row * f.columns + s];
      least = std::min(least, cost);
      if (s == objective.d.columns[row]) now = cost;
    }
    leaning[row] = {least - now, {row, 0}};
  }
  number = std::min(number, f.rows);
  std::nth_element(leaning.begin(), leaning.begin() + number, leaning.end(), [](const Leaning& a, const Leaning& b) {
    return a.key < b.key || (a.key == b.key && a.move.row < b.move.row);
  });
  std::vector<int64_t> rows(number);
  std::transform(leaning.begin(), leaning.begin() + number, rows.begin(), [](const Leaning& a) { return a.move.row; });
  return rows;
}

// Single moves of the adapters that are nearest to a tie.
void Mend(const Folded& f, Decision& d, const double* total) {
  std::vector<int64_t> rows = Closest(f, d.columns, total, kClose);
  for (double sharpness : kSharpness) {
    Objective objective(f, d, sharpness);
    if (!rows.empty()) SingleMoves(objective, rows.data(), rows.size(), kMendRounds);
  }
}

// A decision near the relaxed one.
class Rounding {
 public:
  // `open` [S]: columns of active adapters, all for those who may have none of them.
  Rounding(const Folded& folded, Decision* decision, const Relaxed& relaxed, const uint8_t* open)
      : f_(folded), d_(*decision), relaxed_(relaxed), objective_(f_, d_, 0.0),
        usable_(relaxed.total, relaxed.total + f_.rows * f_.columns) {
    for (int64_t row = 0; row < f_.rows; ++row) {
      const uint8_t* allowed = f_.allowed + row * f_.columns;
      bool any = false;
      for (int64_t s = 0; s < f_.columns; ++s) any |= allowed[s] && (open[s] || !f_.active[row]);
      for (int64_t s = 0; any && s < f_.columns; ++s) {
        if (f_.active[row] && !open[s]) usable_[row * f_.columns + s] = kInf;
      }
    }
  }

  // [M, S]: the relaxed decision of all adapters at prices that were found from a few.
  std::vector<double> Shares(double softness) const {
    std::vector<double> shares(usable_.size());
    for (size_t first = 0; first < shares.size(); first += f_.columns) {
      double least = *std::min_element(usable_.begin() + first, usable_.begin() + first + f_.columns), sum = 0.0;
      for (size_t at = first; at < first + f_.columns; ++at) {
        sum += shares[at] = softness / (usable_[at] - least + softness);
      }
      for (size_t at = first; at < first + f_.columns; ++at) shares[at] /= sum;
    }
    return shares;
  }

  // The best of the largest share of everyone, and of shares drawn by sequences that are even over any few neighbours.
  void Draw(const double* shares, const double* by_home, double byte_s) {
    Kept start(f_, d_), best = start;
    double least = kInf;
    for (int draw = -1; draw < kDraws; ++draw) {
      start.GiveTo(&d_);
      for (int64_t row = 0; row < f_.rows; ++row) {
        const double* share = shares + row * f_.columns;
        int64_t column = std::max_element(share, share + f_.columns) - share;
        if (draw >= 0) column = Drawn(share, kGolden * by_home[row] + static_cast<double>(draw) / kDraws, column);
        d_.columns[row] = column;
      }
      AddUp(f_, &d_);
      double worth = Worth(byte_s);
      if (draw < 0 || worth < least) best = Kept(f_, d_), least = worth;
    }
    best.GiveTo(&d_);
  }

  // Levels, makes fit and mends as far as the decision is worth more than `enough_s`.
  void Improve(double byte_s, double enough_s) {
    for (double sharpness : kLevels) {
      if (Worth(byte_s) <= enough_s) break;
      Objective soft(f_, d_, sharpness);
      Level(soft, {relaxed_.prices, usable_.data(), relaxed_.adapter_byte, relaxed_.fraction}, byte_s);
    }
    MakeFit(objective_, relaxed_.total, relaxed_.adapter_byte);
    if (objective_.Value() > enough_s) {
      Mend(f_, d_, usable_.data());
      BestFraction(objective_);
    }
    BestFraction(objective_);
  }

 private:
  double Worth(double byte_s) { return objective_.Value() + byte_s * objective_.Overshoot(d_.bytes); }

  int64_t Drawn(const double* share, double number, int64_t largest) const {
    double at = std::fmod(number, 1.0) * 0.998 + 0.001, edge = share[0];
    int64_t column = 0;
    while (edge < at && column + 1 < f_.columns) edge += share[++column];
    return share[column] > 1e-6 ? column : largest;
  }

  const Folded& f_;
  Decision& d_;
  Relaxed relaxed_;
  Objective objective_;
  std::vector<double> usable_;
};

}  // namespace
}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

double plora_plan_value(const Folded* folded, Decision* decision) {
  return Objective(*folded, *decision, 0.0).Value();
}

void plora_plan_best_fraction(const Folded* folded, Decision* decision) {
  Objective objective(*folded, *decision, 0.0);
  BestFraction(objective);
}

void plora_plan_make_fit(const Folded* folded, Decision* decision, const double* total, double adapter_byte) {
  Objective objective(*folded, *decision, 0.0);
  MakeFit(objective, total, adapter_byte);
}

void plora_plan_take_cheapest(const Folded* folded, Decision* decision, const double* total) {
  Objective objective(*folded, *decision, 0.0);
  TakeCheapest(objective, total);
}

// [number] rows, when there are more.
void plora_plan_closest(const Folded* folded, const Decision* decision, const double* total, int64_t number,
                        int64_t* rows) {
  std::vector<int64_t> closest = Closest(*folded, decision->columns, total, number);
  std::copy(closest.begin(), closest.end(), rows);
}

// The same.
void plora_plan_pressing(const Folded* folded, Decision* decision, double sharpness, int64_t number, int64_t* rows) {
  Objective objective(*folded, *decision, sharpness);
  std::vector<int64_t> pressing = Pressing(objective, number);
  std::copy(pressing.begin(), pressing.end(), rows);
}

// `shares` [M, S]; null: those at the prices, soft within `softness` seconds. No decision is worth less than `bound_s`,
// and one that is not worth more than `enough_s` is not improved; both without what no decision changes.
void plora_plan_round(const Folded* folded, Decision* decision, const double* prices, const double* total,
                      double adapter_byte, double fraction, const uint8_t* open, const double* shares, double softness,
                      const double* by_home, double byte_s, double enough_s) {
  Rounding rounding(*folded, decision, {prices, total, adapter_byte, fraction}, open);
  std::vector<double> softened = shares ? std::vector<double>() : rounding.Shares(softness);
  rounding.Draw(shares ? shares : softened.data(), by_home, byte_s);
  rounding.Improve(byte_s, enough_s);
}

}  // extern "C"
