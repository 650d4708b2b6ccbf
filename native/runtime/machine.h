// What the machine can do at most: the limits that benchmarks are held against.
#pragma once

#include "runtime/memory.h"

namespace invar {

// Integer dot products per second of `threads` threads, in 10^9 operations (a multiply and an add
// are two): vpdpbusd on AVX-512, vpmaddubsw + vpaddw on AVX2, 0 elsewhere.
double int8_peak_gops(int threads, double seconds);

// Products of bf16 pairs, in 10^9 operations as above: vdpbf16ps on AVX-512, two fp32 fmas a pair
// on AVX2 (so this is also the fp32 limit there), 0 elsewhere.
double bf16_peak_gflops(int threads, double seconds);

// Fused multiply-adds of fp32, in 10^9 operations as above.
double fp32_peak_gflops(int threads, double seconds);

// 10^9 bytes per second that `threads` threads read from `memory`, each its own contiguous share.
// It must be larger than the caches and have been written to: untouched pages are all one page.
double read_rate_gbs(const Memory& memory, int threads, double seconds);

}  // namespace invar
