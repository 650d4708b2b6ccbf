#include "runtime/checksum.h"

#include <bit>
#include <cstring>

namespace invar {
namespace {

constexpr int kLanes = 8;  // a multiply takes 3 to 4 cycles, one starts each cycle
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;

// The second product spreads what the first one leaves in the highest bit alone.
uint64_t mix(uint64_t lane, uint64_t word) { return std::rotl((lane ^ word) * kOdd, 32) * kOdd; }

struct Lanes {
  uint64_t of[kLanes];

  void take(const uint8_t* data) {
    for (int i = 0; i < kLanes; ++i) {
      uint64_t word;
      std::memcpy(&word, data + i * sizeof(word), sizeof(word));
      of[i] = mix(of[i], word);
    }
  }
};

}  // namespace

uint64_t checksum(const uint8_t* data, int64_t bytes) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes.of[i] = kOdd * static_cast<uint64_t>(i + 1);
  const int64_t rest = bytes % sizeof(lanes);
  for (int64_t at = 0; at < bytes - rest; at += sizeof(lanes)) lanes.take(data + at);
  if (rest) {
    uint8_t last[sizeof(lanes)] = {};
    std::memcpy(last, data + bytes - rest, rest);
    lanes.take(last);
  }
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (uint64_t lane : lanes.of) sum = mix(sum, lane);
  return sum;
}

}  // namespace invar
