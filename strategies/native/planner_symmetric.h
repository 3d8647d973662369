// Equations of a symmetric positive definite matrix, by its Cholesky factor.

#pragma once

#include <cmath>
#include <cstdint>

#include "planner_sums.h"

namespace plora::planner {

// A symmetric matrix, of which the upper half is kept by rows, and its Cholesky factor U' U in the same place.
struct Symmetric {
  double* numbers;
  int64_t size;

  double* Row(int64_t i) const { return numbers + i * size; }

  // False: it is not positive definite.
  bool Factor() const {
    for (int64_t k = 0; k < size; ++k) {
      double* row = Row(k);
      if (!(row[k] > 0.0)) return false;
      double root = std::sqrt(row[k]);
      for (int64_t j = k; j < size; ++j) row[j] /= root;
      for (int64_t i = k + 1; i < size; ++i) {
        for (int64_t j = i; j < size; ++j) Row(i)[j] -= row[i] * row[j];
      }
    }
    return true;
  }

  // Solves in place, once factored.
  void Solve(double* b) const {
    for (int64_t k = 0; k < size; ++k) {
      b[k] /= Row(k)[k];
      for (int64_t j = k + 1; j < size; ++j) b[j] -= Row(k)[j] * b[k];
    }
    for (int64_t k = size - 1; k >= 0; --k) {
      int64_t rest = size - k - 1;
      b[k] = (b[k] - Dot(Row(k) + k + 1, b + k + 1, rest)) / Row(k)[k];
    }
  }
};

}  // namespace plora::planner
