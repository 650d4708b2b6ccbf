// A checksum that finds damage in stored bytes at the rate of memory.
#pragma once

#include <cstdint>

namespace invar {

// Eight lanes of 64-bit words, as FNV-1a with a second product: each step is a bijection of the
// lane and of the word, so a change within one word of 8 bytes always shows, and any other one is
// missed with a probability of 2^-64. It is no defence against who means to deceive. The same on
// every machine with little-endian words.
uint64_t checksum(const uint8_t* data, int64_t bytes);

}  // namespace invar
