// Improvements of a decision by moves, as others call them.

#pragma once

#include <cstdint>

#include "planner_decision.h"

namespace plora::planner {

// Takes the best single moves of some rows, several at once, until none helps: `single_moves` of improve.py.
void SingleMoves(Objective& objective, const int64_t* rows, int64_t number, int64_t rounds);

}  // namespace plora::planner
