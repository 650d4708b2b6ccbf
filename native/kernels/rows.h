// Operations on one row of floats: norms, residual adds, activations, soft cap and rope.
// Any length and alignment; a tail gives what the row padded with zeros would give.
#pragma once

#include "kernels/kernels.h"
#include "kernels/math.h"

#define INVAR_LAMBDA_INLINE __attribute__((always_inline))

namespace invar::INVAR_ISA {

// Sum of squares of a row. Group i of sixteen elements goes to accumulator i mod 4, each lane folds
// in ascending order by fma, then (0 + 1) + (2 + 3), then the 16-lane tree. Four accumulators
// because an fma has a latency of 4 cycles and two start in each (on AVX2 these are 8 chains).
constexpr int kSquareAccumulators = 4;
float sum_of_squares(const float* x, int64_t n);

// out[i] = f(i, lanes) for i in [0, n), tails by masked loads and stores.
template <typename F>
INVAR_INLINE void map_row(int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + W <= n; i += W)
    store(out + i, f([](const float* p) INVAR_LAMBDA_INLINE { return load(p); }, i));
  if (int rest = int(n - i); rest > 0)
    store_n(out + i, rest,
            f([rest](const float* p) INVAR_LAMBDA_INLINE { return load_n(p, rest); }, i));
}

}  // namespace invar::INVAR_ISA
