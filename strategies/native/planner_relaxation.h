// The planner's linear relaxation: method, names and limits are those of strategies/planner/relaxation.py.
//
// Rows that load the same places are a group. Numbers of options are kept group by group, in these column by column,
// [S, rows]: what is summed over the options of a row is a sum of columns, and loops run over the rows side by side.
// Work is [places of the group, S, rows], so nothing is computed with the zeros of places that a group does not load.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "planner_sums.h"
#include "planner_symmetric.h"

namespace plora::planner {

constexpr double kStep = 0.99;      // of the way to the nearest boundary
constexpr double kFeasible = 1e-3;  // largest violation of a place's limit that counts as none
constexpr int kTile = 4;

// Arrays that live as long as the workspace.
class Workspace {
 public:
  double* Take(int64_t count) { return arrays_.emplace_back(count).data(); }

 private:
  std::vector<std::vector<double>> arrays_;
};

// Primal and dual variables, or a direction of them.
struct Point {
  double *x, *z, *slack, *prices, *t;
};

// Parts of a direction, of its primal and of its dual variables.
struct Reached {
  double x, z;
};

// Rows, their options and the places that they load. Behind the options of a place is what the rows' own equations take
// off, [rows], and zeros up to whole vectors.
struct Group {
  std::vector<int64_t> rows, places;
  int64_t first_row, first_option, options, stride;
  double *work, *weighted;

  int64_t size() const { return rows.size(); }
  double* Work(size_t place) const { return work + place * stride; }
  double* Weighted(size_t place) const { return weighted + place * stride; }
};

class Relaxation {
 public:
  // As of the Python class; what is given has [N, S] and [N, S, places].
  Relaxation(int64_t rows, int64_t columns, int64_t places, const double* work, const double* cost,
             const uint8_t* allowed, const int64_t* home, const int64_t* phase_of, const double* limit)
      : n_(rows), s_(columns), o_(rows * columns), p_(places), phase_of_(phase_of), limit_(limit),
        f_(places ? *std::max_element(phase_of, phase_of + places) + 1 : 0) {
    cost_ = space_.Take(o_), mask_ = space_.Take(o_), dual_ = space_.Take(o_);
    weight_ = space_.Take(o_), free_ = space_.Take(o_), gaps_ = space_.Take(o_);
    total_ = space_.Take(n_), surplus_ = space_.Take(n_), level_ = space_.Take(n_);
    missing_ = space_.Take(p_), slack_gaps_ = space_.Take(p_);
    normal_ = {space_.Take(p_ * p_), p_}, towards_t_ = space_.Take(f_ * p_), of_t_ = {space_.Take(f_ * f_), f_};
    point_ = TakePoint(), trial_ = TakePoint();
    GroupRows(home, work);
    ForGiven([&](int64_t from, int64_t o) {
      mask_[o] = allowed[from];
      cost_[o] = allowed[from] ? cost[from] : 0.0;
    });
    options_ = Sum(o_, [&](int64_t o) { return mask_[o]; });
  }

  // Steps until primal and dual values differ by `gap` of the value; gives their number.
  int64_t Solve(double gap, int64_t most_steps) {
    Start();
    aim_ = gap;
    double best_bound = -kInf;
    for (int64_t step = 0;; ++step) {
      double bound = Bound();
      best_bound = std::max(best_bound, bound);
      double value = Dot(cost_, point_.x, o_) + Sum(f_, [&](int64_t f) { return point_.t[f]; });
      double violation = 0.0;
      Load(point_.x, missing_);
      for (int64_t p = 0; p < p_; ++p) {
        missing_[p] = limit_[p] - missing_[p] + OfPhase(point_.t, p) - point_.slack[p];
        violation = std::max(violation, std::abs(missing_[p]));
      }
      bool done = value - best_bound <= gap * std::abs(value) && violation <= kFeasible;
      if (done || step == most_steps || !std::isfinite(bound) || !Step()) return step;
    }
  }

  void Give(double* shares, double* prices, double* softness) const {
    ForGiven([&](int64_t from, int64_t o) { shares[from] = point_.x[o]; });
    std::copy_n(point_.prices, p_, prices);
    *softness = aim_;
  }

 private:
  // Rows of one home load the same places, or few others.
  void GroupRows(const int64_t* home, const double* work) {
    std::map<int64_t, Group> groups;
    for (int64_t row = 0; row < n_; ++row) groups[home[row]].rows.push_back(row);
    int64_t first = 0;
    for (auto& [_, group] : groups) {
      group.first_row = first, group.first_option = first * s_, group.options = group.size() * s_;
      first += group.size();
      std::vector<double> loads(p_, 0.0);
      for (int64_t row : group.rows) {
        for (int64_t s = 0; s < s_; ++s) {
          const double* from = work + (row * s_ + s) * p_;
          for (int64_t p = 0; p < p_; ++p) loads[p] = std::max(loads[p], std::abs(from[p]));
        }
      }
      for (int64_t p = 0; p < p_; ++p) {
        if (loads[p] > 0.0) group.places.push_back(p);
      }
      group.stride = (group.options + group.size() + kWide - 1) / kWide * kWide;
      group.work = space_.Take(group.places.size() * group.stride);
      group.weighted = space_.Take(group.places.size() * group.stride);
      for (int64_t o = 0; o < group.options; ++o) {
        const double* from = work + (group.rows[o % group.size()] * s_ + o / group.size()) * p_;
        for (size_t i = 0; i < group.places.size(); ++i) group.Work(i)[o] = from[group.places[i]];
      }
      groups_.push_back(std::move(group));
    }
  }

  Point TakePoint() {
    Point point;
    point.x = space_.Take(o_), point.z = space_.Take(o_);
    point.slack = space_.Take(p_), point.prices = space_.Take(p_), point.t = space_.Take(f_);
    return point;
  }

  double OfPhase(const double* t, int64_t place) const { return phase_of_[place] < 0 ? 0.0 : t[phase_of_[place]]; }

  // Sums of places by phase.
  void ByPhase(const double* of_places, double* out) const {
    std::fill_n(out, f_, 0.0);
    for (int64_t p = 0; p < p_; ++p) {
      if (phase_of_[p] >= 0) out[phase_of_[p]] += of_places[p];
    }
  }

  // [S, N]: what options cost at prices of their work.
  void Priced(const double* prices, double* out) const {
    std::fill_n(out, o_, 0.0);
    for (const Group& group : groups_) {
      for (size_t i = 0; i < group.places.size(); ++i) {
        double price = prices[group.places[i]], *work = group.Work(i), *to = out + group.first_option;
        for (int64_t o = 0; o < group.options; ++o) to[o] += price * work[o];
      }
    }
  }

  // What shares of options load the places with.
  void Load(const double* shares, double* out) const {
    std::fill_n(out, p_, 0.0);
    for (const Group& group : groups_) {
      for (size_t i = 0; i < group.places.size(); ++i) {
        out[group.places[i]] += Dot(group.Work(i), shares + group.first_option, group.options);
      }
    }
  }

  // Calls visit(row, option) for all options of a group.
  template <typename F>
  void ForOptionsOf(const Group& group, const F& visit) const {
    int64_t o = group.first_option;
    for (int64_t s = 0; s < s_; ++s, o += group.size()) {
      for (int64_t row = 0; row < group.size(); ++row) visit(group.first_row + row, o + row);
    }
  }

  // Calls visit(row, option) for all options.
  template <typename F>
  void ForOptions(const F& visit) const {
    for (const Group& group : groups_) ForOptionsOf(group, visit);
  }

  // Calls visit(index in [N, S] as given, option) for all options.
  template <typename F>
  void ForGiven(const F& visit) const {
    for (const Group& group : groups_) {
      for (int64_t o = 0; o < group.options; ++o) {
        visit(group.rows[o % group.size()] * s_ + o / group.size(), group.first_option + o);
      }
    }
  }

  // [N] sums over the options of each row of of(option).
  template <typename F>
  void OfRows(double* out, const F& of) const {
    std::fill_n(out, n_, 0.0);
    ForOptions([&](int64_t row, int64_t o) { out[row] += of(o); });
  }

  // [N] the least of dual_ among the open options of each row.
  void LeastDual(double* out) const {
    std::fill_n(out, n_, kInf);
    ForOptions([&](int64_t row, int64_t o) { out[row] = std::min(out[row], mask_[o] > 0 ? dual_[o] : kInf); });
  }

  void PriceOptions() {
    Priced(point_.prices, dual_);
    for (int64_t o = 0; o < o_; ++o) dual_[o] += cost_[o];
  }

  double Bound() {
    PriceOptions();
    LeastDual(level_);
    return Sum(n_, [&](int64_t row) { return level_[row]; }) - Dot(limit_, point_.prices, p_);
  }

  // Inside all bounds, with prices that are feasible; limits without t may be missed.
  void Start() {
    double *slack = point_.slack, *prices = point_.prices, *t = point_.t;
    OfRows(total_, [&](int64_t o) { return mask_[o]; });
    ForOptions([&](int64_t row, int64_t o) { point_.x[o] = mask_[o] / total_[row]; });
    std::fill_n(t, f_, -kInf);
    Load(point_.x, slack);
    for (int64_t p = 0; p < p_; ++p) {
      slack[p] -= limit_[p];  // for now, what it is over by
      if (phase_of_[p] >= 0) t[phase_of_[p]] = std::max(t[phase_of_[p]], slack[p]);
    }
    double scale = std::max(Largest(f_, 0.0, [&](int64_t f) { return std::abs(t[f]); }), 1e-9);
    for (int64_t f = 0; f < f_; ++f) t[f] += 0.1 * scale;
    for (int64_t p = 0; p < p_; ++p) {
      bool timed = phase_of_[p] >= 0;
      slack[p] = timed ? OfPhase(t, p) - slack[p] : std::max(-slack[p], 0.1);
      prices[p] = timed ? 1.0 / slack[p] : 0.0;
    }
    ByPhase(prices, trial_.t);
    for (int64_t p = 0; p < p_; ++p) {
      prices[p] = phase_of_[p] >= 0 ? prices[p] / std::max(OfPhase(trial_.t, p), 1e-300) : 0.1;
    }
    PriceOptions();
    LeastDual(level_);
    OfRows(surplus_, [&](int64_t o) { return dual_[o] * mask_[o]; });
    for (int64_t row = 0; row < n_; ++row) {
      double least = level_[row], mean = surplus_[row] / total_[row];
      level_[row] = least - 0.1 * (mean - least) - 1e-4 * std::abs(least) - 1e-9;
    }
    ForOptions([&](int64_t row, int64_t o) { point_.z[o] = mask_[o] > 0 ? dual_[o] - level_[row] : 1.0; });
  }

  // Moves the point; false when the equations cannot be solved.
  bool Step() {
    if (!Prepare()) return false;
    Point &at = point_, &to = trial_;
    double total = Dot(at.x, at.z, o_) + Dot(at.slack, at.prices, p_);  // x is 0 where an option is closed
    for (int64_t o = 0; o < o_; ++o) gaps_[o] = -at.x[o] * at.z[o];
    for (int64_t p = 0; p < p_; ++p) slack_gaps_[p] = -at.slack[p] * at.prices[p];
    Direction();
    Reached by = Reach();
    double after = Sum(o_, [&](int64_t o) { return (at.x[o] + by.x * to.x[o]) * (at.z[o] + by.z * to.z[o]); });
    after += Sum(p_, [&](int64_t p) {
      return (at.slack[p] + by.x * to.slack[p]) * (at.prices[p] + by.z * to.prices[p]);
    });
    aim_ = total / (options_ + static_cast<double>(p_)) * std::pow(std::min(1.0, after / total), 3);
    for (int64_t o = 0; o < o_; ++o) gaps_[o] = (aim_ - at.x[o] * at.z[o] - to.x[o] * to.z[o]) * mask_[o];
    for (int64_t p = 0; p < p_; ++p) slack_gaps_[p] = aim_ - at.slack[p] * at.prices[p] - to.slack[p] * to.prices[p];
    Direction();
    by = Reach();
    by = {std::min(1.0, kStep * by.x), std::min(1.0, kStep * by.z)};
    for (int64_t o = 0; o < o_; ++o) at.x[o] += by.x * to.x[o], at.z[o] += by.z * to.z[o];
    for (int64_t p = 0; p < p_; ++p) at.slack[p] += by.x * to.slack[p], at.prices[p] += by.z * to.prices[p];
    for (int64_t f = 0; f < f_; ++f) at.t[f] += by.x * to.t[f];
    return true;
  }

  // Factors the matrix of places, G (W - W 1 1' W / total) G' and the slacks'; false: it is singular.
  bool Prepare() {
    for (int64_t o = 0; o < o_; ++o) weight_[o] = point_.x[o] / point_.z[o] * mask_[o];
    OfRows(total_, [&](int64_t o) { return weight_[o]; });
    for (int64_t row = 0; row < n_; ++row) level_[row] = 1.0 / std::sqrt(total_[row]);
    std::fill_n(normal_.numbers, p_ * p_, 0.0);
    for (const Group& group : groups_) {
      const double *weight = weight_ + group.first_option, *level = level_ + group.first_row;
      for (size_t i = 0; i < group.places.size(); ++i) {
        double *work = group.Work(i), *weighted = group.Weighted(i);
        double *mean = work + group.options, *minus = weighted + group.options;
        for (int64_t o = 0; o < group.options; ++o) weighted[o] = weight[o] * work[o];
        std::fill_n(mean, group.size(), 0.0);
        for (int64_t s = 0; s < s_; ++s) {
          for (int64_t row = 0; row < group.size(); ++row) mean[row] += weighted[s * group.size() + row];
        }
        for (int64_t row = 0; row < group.size(); ++row) mean[row] *= level[row], minus[row] = -mean[row];
      }
      Multiply(group);
    }
    for (int64_t p = 0; p < p_; ++p) normal_.Row(p)[p] += point_.slack[p] / point_.prices[p];
    if (!normal_.Factor()) return false;
    for (int64_t f = 0; f < f_; ++f) {
      double* column = towards_t_ + f * p_;
      for (int64_t p = 0; p < p_; ++p) column[p] = phase_of_[p] == f;
      normal_.Solve(column);
      ByPhase(column, of_t_.Row(f));
    }
    return of_t_.Factor();
  }

  // Adds the upper half of weighted work times work, by blocks that stay in the cache.
  void Multiply(const Group& group) {
    constexpr int64_t kBlock = 256;
    int64_t places = group.places.size(), tiles[2];
    for (int64_t first = 0; first < group.stride; first += kBlock) {
      int64_t count = std::min(kBlock, group.stride - first);
      for (tiles[0] = 0; tiles[0] < places; tiles[0] += kTile) {
        for (tiles[1] = tiles[0]; tiles[1] < places; tiles[1] += kTile) MultiplyTile(group, tiles, first, count);
      }
    }
  }

  // The same for kTile places from each of two on, and some numbers of each.
  void MultiplyTile(const Group& group, const int64_t* tiles, int64_t first, int64_t count) {
    const double *left[kTile], *right[kTile];
    int64_t places = group.places.size();
    for (int64_t i = 0; i < kTile; ++i) {  // what is beyond the last place is computed, and not added
      left[i] = group.Weighted(std::min(tiles[0] + i, places - 1)) + first;
      right[i] = group.Work(std::min(tiles[1] + i, places - 1)) + first;
    }
    Wide sums[kTile][kTile] = {};
    for (int64_t at = 0; at < count; at += kWide) {
      Wide of_left[kTile], of_right[kTile];
      for (int i = 0; i < kTile; ++i) of_left[i] = Loaded(left[i] + at), of_right[i] = Loaded(right[i] + at);
      for (int i = 0; i < kTile; ++i) {
        for (int j = 0; j < kTile; ++j) sums[i][j] += of_left[i] * of_right[j];
      }
    }
    for (int64_t i = tiles[0]; i < std::min(tiles[0] + kTile, places); ++i) {
      for (int64_t j = std::max(i, tiles[1]); j < std::min(tiles[1] + kTile, places); ++j) {
        normal_.Row(group.places[i])[group.places[j]] += Total(sums[i - tiles[0]][j - tiles[1]]);
      }
    }
  }

  // trial_ becomes the move after which products of primal and dual variables have changed by gaps_, to first order.
  void Direction() {
    Point &at = point_, &to = trial_;
    for (int64_t o = 0; o < o_; ++o) free_[o] = gaps_[o] / at.z[o];
    OfRows(surplus_, [&](int64_t o) { return free_[o]; });
    ForOptions([&](int64_t row, int64_t o) { to.x[o] = free_[o] - weight_[o] * (surplus_[row] / total_[row]); });
    Load(to.x, to.prices);
    for (int64_t p = 0; p < p_; ++p) to.prices[p] += slack_gaps_[p] / at.prices[p] - missing_[p];
    normal_.Solve(to.prices);
    ByPhase(to.prices, to.t);
    of_t_.Solve(to.t);
    for (int64_t f = 0; f < f_; ++f) {
      for (int64_t p = 0; p < p_; ++p) to.prices[p] -= towards_t_[f * p_ + p] * to.t[f];
    }
    Priced(to.prices, to.z);
    OfRows(level_, [&](int64_t o) { return weight_[o] * to.z[o]; });
    for (int64_t row = 0; row < n_; ++row) level_[row] = (level_[row] - surplus_[row]) / total_[row];
    ForOptions([&](int64_t row, int64_t o) {
      to.z[o] = (to.z[o] - level_[row]) * mask_[o];
      to.x[o] = free_[o] - weight_[o] * to.z[o];
    });
    for (int64_t p = 0; p < p_; ++p) to.slack[p] = (slack_gaps_[p] - at.slack[p] * to.prices[p]) / at.prices[p];
  }

  // How far along trial_ all primal, and all dual variables stay positive; at most 1 / kStep.
  Reached Reach() const {
    const Point &at = point_, &to = trial_;
    double primal = Largest(o_, kStep, [&](int64_t o) { return -to.x[o] / std::max(at.x[o], 1e-300); });
    double dual = Largest(o_, kStep, [&](int64_t o) { return -to.z[o] / at.z[o]; });
    primal = Largest(p_, primal, [&](int64_t p) { return -to.slack[p] / at.slack[p]; });
    dual = Largest(p_, dual, [&](int64_t p) { return -to.prices[p] / at.prices[p]; });
    return {1.0 / primal, 1.0 / dual};
  }

  int64_t n_, s_, o_, p_;  // rows, columns, options, places
  const int64_t* phase_of_;
  const double* limit_;
  int64_t f_;  // phases
  Workspace space_;
  std::vector<Group> groups_;
  double *cost_, *mask_, *dual_, *weight_, *free_, *gaps_;
  double *total_, *surplus_, *level_, *missing_, *slack_gaps_, *towards_t_;
  Symmetric normal_, of_t_;
  Point point_, trial_;
  double options_, aim_ = 0.0;
};

}  // namespace plora::planner
