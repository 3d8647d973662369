// A part of a planning problem in the form of the relaxation, and its answer in seconds: strategies/planner/prices.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "planner_decision.h"
#include "planner_relaxation.h"

namespace plora::planner {
namespace {

// As `Node` of prices.py.
struct Node {
  int64_t attention;
  const uint8_t* columns;  // [S]
  bool whole, charged;
};

// As `Part` of prices.py: M rows.
struct Part {
  int64_t rows;
  const int64_t* row_of;
  const double *weight, *loads;  // [M], [K]
  double used_bytes;
};

// A limit of bytes, in units: what all KV takes of it, and how much there is.
struct Limit {
  double kv, room;
};

// A piece of P, whose costs are linear from `low` to `high`.
struct Piece {
  double low, high;
};

class Builder {
 public:
  Builder(const Folded& folded, const Node& node, const Part& part, int64_t places, const int64_t* place,
          double scale_s)
      : f_(folded), part_(part), k_(places), place_(place), scale_s_(scale_s),
        columns_(std::max<int64_t>(f_.columns, 2)), unit_(std::max(f_.kv_bytes, 1.0)) {
    unit_ = Largest(f_.rows * f_.columns, unit_, [&](int64_t i) { return f_.bytes[i]; });
    double bend = std::min(std::max(f_.current_fraction, f_.min_fraction), f_.most_fraction);
    low_ = node.whole ? 1.0 : f_.min_fraction;
    double edges[] = {low_, node.whole ? 1.0 : bend, node.whole ? 1.0 : f_.most_fraction};
    for (int i = 0; i < 2; ++i) {
      if (edges[i + 1] > edges[i]) pieces_.push_back({edges[i], edges[i + 1]});
    }
    Open(node);
    Base(node);
    Limits(edges[2]);
  }

  // `noise` [M, S] is added to costs; null: none. Gives shares [M, S] and P; prices of places [K], which are 0 but at
  // the relaxation's, of bytes in all and for adapters alone, and the softness.
  void Solve(double gap, const double* noise, double* shares, double* prices, double* numbers) {
    int64_t m = part_.rows, all = m + static_cast<int64_t>(pieces_.size()), wide = k_ + NumLimits();
    std::vector<double> work(all * columns_ * wide), cost(all * columns_), limit(wide), found(all * columns_);
    std::vector<uint8_t> allowed(all * columns_);
    std::vector<int64_t> home(all, -1), phase_of(wide, -1);
    for (int64_t row = 0; row < m; ++row) {
      home[row] = f_.home[part_.row_of[row]];
      for (int64_t s = 0; s < f_.columns; ++s) {
        int64_t from = part_.row_of[row] * f_.columns + s, to = row * columns_ + s;
        if (!(allowed[to] = open_[row * f_.columns + s])) continue;
        double weight = part_.weight[row], *out = work.data() + to * wide;
        for (int64_t k = 0; k < k_; ++k) out[k] = f_.work[from * f_.places + place_[k]] * (weight / scale_s_);
        for (int64_t k = k_; k < wide; ++k) out[k] = f_.bytes[from] * (weight / unit_);
        cost[to] = f_.own[from] * (weight / scale_s_) + (noise ? noise[row * f_.columns + s] * weight : 0.0);
      }
    }
    // A piece of P is a row of two options: left in the pool, on the device.
    for (int64_t row = m; row < all; ++row) {
      double length = pieces_[row - m].high - pieces_[row - m].low, *out = work.data() + (row * columns_ + 1) * wide;
      for (int64_t k = 0; k < k_; ++k) out[k] = slope_[k] * (length / scale_s_);
      for (int64_t k = k_; k < wide; ++k) out[k] = limits_[k - k_].kv * length;
      cost[row * columns_ + 1] = pieces_[row - m].high > f_.current_fraction ? f_.kv_move_s * length / scale_s_ : 0.0;
      allowed[row * columns_] = allowed[row * columns_ + 1] = 1;
    }
    for (int64_t k = 0; k < k_; ++k) {
      phase_of[k] = std::upper_bound(f_.starts, f_.starts + f_.phases, place_[k]) - f_.starts - 1;
      limit[k] = -base_[k] / scale_s_;
    }
    for (int64_t k = k_; k < wide; ++k) limit[k] = limits_[k - k_].room;
    Relaxation relaxation(all, columns_, wide, work.data(), cost.data(), allowed.data(), home.data(), phase_of.data(),
                          limit.data());
    relaxation.Solve(gap, kMostSteps);
    std::vector<double> price(wide);
    double softness = 0.0, fraction = low_, heaviest = 1.0;
    relaxation.Give(found.data(), price.data(), &softness);
    for (int64_t row = 0; row < m; ++row) {
      heaviest = std::max(heaviest, part_.weight[row]);
      for (int64_t s = 0; s < f_.columns; ++s) {
        shares[row * f_.columns + s] = found[row * columns_ + s] * open_[row * f_.columns + s];
      }
    }
    for (int64_t row = m; row < all; ++row) {
      fraction += (pieces_[row - m].high - pieces_[row - m].low) * found[row * columns_ + 1];
    }
    std::fill_n(prices, f_.places, 0.0);
    for (int64_t k = 0; k < k_; ++k) prices[place_[k]] = price[k];
    double bytes = 0.0;
    for (int64_t k = k_; k < wide; ++k) bytes += price[k] * (scale_s_ / unit_);
    double joint = has_joint_ ? price[k_] * (scale_s_ / unit_) : 0.0;
    double given[] = {joint, bytes - joint, softness * scale_s_ / heaviest, fraction};
    std::copy_n(given, 4, numbers);
  }

 private:
  static constexpr int64_t kMostSteps = 25;

  int64_t NumLimits() const { return limits_.size(); }

  // Columns that rows may have in the node; where that leaves none, all that are allowed.
  void Open(const Node& node) {
    open_.resize(part_.rows * f_.columns);
    for (int64_t row = 0; row < part_.rows; ++row) {
      const uint8_t* allowed = f_.allowed + part_.row_of[row] * f_.columns;
      uint8_t *open = open_.data() + row * f_.columns, any = 0, idle = !f_.active[part_.row_of[row]];
      for (int64_t s = 0; s < f_.columns; ++s) any |= open[s] = allowed[s] & (node.columns[s] | idle);
      if (!any) std::copy_n(allowed, f_.columns, open);
    }
  }

  void Base(const Node& node) {
    base_.resize(k_), slope_.resize(k_);
    for (int64_t i = 0; i < k_; ++i) {
      int64_t k = place_[i];
      double pool = f_.kv_pool[node.attention * f_.places + k];
      slope_[i] = f_.kv_device[k] - pool;
      base_[i] = part_.loads[k] + pool + low_ * slope_[i];
      for (int64_t s = 0; f_.fixed && node.charged && s < f_.columns; ++s) {
        if (node.columns[s]) base_[i] += f_.fixed[s * f_.places + k];
      }
    }
  }

  // Limits that bind at all; the joint one first.
  void Limits(double most_kv) {
    double need = part_.used_bytes, least = 0.0;
    for (int64_t row = 0; row < part_.rows; ++row) {
      double most = 0.0, fewest = kInf;
      for (int64_t s = 0; s < f_.columns; ++s) {
        if (!open_[row * f_.columns + s]) continue;
        double bytes = f_.bytes[part_.row_of[row] * f_.columns + s];
        most = std::max(most, bytes), fewest = std::min(fewest, bytes);
      }
      need += most * part_.weight[row], least += fewest * part_.weight[row];
    }
    least *= 1 + 1e-6;
    has_joint_ = need + most_kv * f_.kv_bytes > f_.budget;
    if (has_joint_) {
      double room = f_.budget - low_ * f_.kv_bytes - part_.used_bytes;
      limits_.push_back({f_.kv_bytes / unit_, std::max(room, least) / unit_});
    }
    if (need > f_.adapter_limit) limits_.push_back({0.0, std::max(f_.adapter_limit - part_.used_bytes, least) / unit_});
  }

  const Folded& f_;
  const Part& part_;
  int64_t k_;
  const int64_t* place_;  // [k_]
  double scale_s_;
  int64_t columns_;  // pieces of P have two at least
  double unit_, low_;
  std::vector<Piece> pieces_;
  std::vector<uint8_t> open_;
  std::vector<double> base_, slope_;
  std::vector<Limit> limits_;
  bool has_joint_ = false;
};

}  // namespace
}  // namespace plora::planner

using namespace plora::planner;

extern "C" {

int64_t plora_plan_relaxation(int64_t rows, int64_t columns, int64_t places, const double* work, const double* cost,
                              const uint8_t* allowed, const int64_t* home, const int64_t* phase_of,
                              const double* limit, double gap, int64_t most_steps, double* shares, double* prices,
                              double* softness) {
  Relaxation relaxation(rows, columns, places, work, cost, allowed, home, phase_of, limit);
  int64_t steps = relaxation.Solve(gap, most_steps);
  relaxation.Give(shares, prices, softness);
  return steps;
}

void plora_plan_part(const Folded* folded, int64_t attention, const uint8_t* columns, int64_t whole, int64_t charged,
                     int64_t rows, const int64_t* row_of, const double* weight, const double* loads, double used_bytes,
                     int64_t places, const int64_t* place, double scale_s, double gap, const double* noise,
                     double* shares, double* prices, double* numbers) {
  Node node{attention, columns, whole != 0, charged != 0};
  Part part{rows, row_of, weight, loads, used_bytes};
  Builder(*folded, node, part, places, place, scale_s).Solve(gap, noise, shares, prices, numbers);
}

}  // extern "C"
