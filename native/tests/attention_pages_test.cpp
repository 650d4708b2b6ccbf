// How K and V of a token lie in a page of each format, and how they are rounded.
#include "tests/attention_reference.h"

using namespace invar;
using namespace kernel_test;

namespace {

constexpr uint8_t kUntouched = 0xab;

// A page of one head, and which of its bytes were written.
struct Page {
  Page(KVFormat format, int32_t head_dim)
      : format(format),
        head_dim(head_dim),
        bytes(kv_head_bytes(format, head_dim) + 64, kUntouched),
        written(bytes.size()) {}

  // Value i of K (0) or V (1) at a slot; marks its bytes.
  double read(int v, int32_t slot, int32_t i) {
    const int64_t d = head_dim, half = slot / 16, lane = slot % 16;
    if (format == KVFormat::bf16) {
      const int64_t at = v == 0 ? (half * d / 2 + i / 2) * 32 + lane * 2 + i % 2
                                : kPageTokens * d + (slot / 2 * d + i) * 2 + slot % 2;
      float x;
      const uint32_t bits = uint32_t(take<uint16_t>(at * 2)) << 16;
      memcpy(&x, &bits, 4);
      return x;
    }
    const int64_t at = v == 0 ? (half * d + i) * 16 + lane : (kPageTokens + slot) * d + i;
    if (format == KVFormat::int8) {
      const float scale = take<float>(2 * kPageTokens * d + (v * kPageTokens + slot) * 4);
      return take<int8_t>(at) * double(scale);
    }
    const uint16_t h = take<uint16_t>(at * 2);
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double magnitude = exponent == 31  ? (fraction ? kNaN : HUGE_VAL)
                             : exponent == 0 ? std::ldexp(fraction, -24)
                                             : std::ldexp(fraction + 1024, exponent - 25);
    return h >> 15 ? -magnitude : magnitude;
  }
  bool others_untouched() const {
    for (size_t i = 0; i < bytes.size(); i++)
      if (!written[i] && bytes[i] != kUntouched) return false;
    return true;
  }

  KVFormat format;
  int32_t head_dim;
  std::vector<uint8_t> bytes;
  std::vector<bool> written;

 private:
  template <class T>
  T take(int64_t at) {
    T x;
    memcpy(&x, &bytes[at], sizeof x);
    std::fill_n(written.begin() + at, sizeof x, true);
    return x;
  }
};

void layout(const Isa& isa, KVFormat format) {
  const std::string what = std::string(isa.name) + " " + kKVFormatNames[int(format)];
  for (int32_t d : {16, 80, 128}) {
    std::mt19937 random(5);
    Page page(format, d);
    for (int32_t slot : {0, 1, 15, 16, 31}) {
      const auto k = normal(random, d), v = normal(random, d);
      isa.attention[int(format)].store(k.data(), v.data(), d, slot, page.bytes.data());
      const auto k_stored = stored(format, k.data(), d), v_stored = stored(format, v.data(), d);
      for (int32_t i = 0; i < d; i++) {
        check(page.read(0, slot, i) == k_stored[i], what + " store K");
        check(page.read(1, slot, i) == v_stored[i], what + " store V");
      }
    }
    check(page.others_untouched(), what + " store: other slots");
  }
}

// Ties, subnormal halves, the largest half, overflow; the same bits everywhere, of NaN too.
void halves(const std::vector<Isa>& isas) {
  std::vector<float> x = {0.0f,     -0.0f,     1.0f,     -1.0f,    0x1p-14f, 0x1.ffcp-15f,
                          0x1p-24f, 0x1p-25f,  0x3p-26f, 0x1p-26f, 65504.0f, 65519.99f,
                          65520.0f, -65520.0f, 3e38f,    kInf,     -kInf,    1e-40f};
  for (int i = 0; i < 4096; i++) {  // halfway between two halves, and beside it
    const float tie = std::ldexp(1.0f + (2 * i + 1) / 2048.0f, i % 40 - 24);
    x.insert(x.end(), {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInf), -tie});
  }
  const size_t finite = x.size();
  const uint32_t nans[] = {0x7fc00000, 0xffc00001, 0x7f800001, 0x7fffffff};
  for (uint32_t bits : nans) x.push_back(__builtin_bit_cast(float, bits));
  x.resize((x.size() + 15) / 16 * 16);
  std::vector<uint8_t> first;
  for (const Isa& isa : isas) {
    std::vector<uint8_t> all;
    for (size_t at = 0; at < x.size(); at += 16) {
      Page page(KVFormat::fp16, 16);
      isa.attention[int(KVFormat::fp16)].store(&x[at], &x[at], 16, 3, page.bytes.data());
      for (int32_t i = 0; i < 16; i++) {
        const double k = page.read(0, 3, i), want = to_half(x[at + i]);
        const bool is_nan = at + i >= finite && at + i < finite + 4;
        check(is_nan ? std::isnan(k) : k == want && std::signbit(k) == std::signbit(want),
              std::string(isa.name) + " half of " + std::to_string(x[at + i]));
      }
      all.insert(all.end(), page.bytes.begin(), page.bytes.end());
    }
    if (first.empty()) first = all;
    check(all == first, std::string(isa.name) + " halves: bits differ");
  }
}

// Zeros, values whose scale would be denormal, and what overflowed.
void codes(const Isa& isa) {
  const int32_t d = 32;
  for (float value : {0.0f, 1e-37f, kInf, kNaN}) {
    std::vector<float> k(d, 0.5f), v(d, -2.0f);
    if (std::isfinite(value)) std::fill(k.begin(), k.end(), value);
    k[7] = value;
    Page page(KVFormat::int8, d);
    isa.attention[int(KVFormat::int8)].store(k.data(), v.data(), d, 9, page.bytes.data());
    const std::string what = std::string(isa.name) + " codes of " + std::to_string(value);
    for (int32_t i = 0; i < d; i++) {
      const double x = page.read(0, 9, i);
      check(std::isfinite(value) ? x == 0 : std::isnan(x), what);
      check(page.read(1, 9, i) == -127 * double(2.0f * (1.0f / 127.0f)), what + ": V");
    }
    check(page.others_untouched(), what + ": other slots");
  }
}

}  // namespace

int main() {
  flush_denormals();
  const auto isas = instruction_sets();
  for (const Isa& isa : isas) {
    for (int f = 0; f < int(KVFormat::count); f++) layout(isa, KVFormat(f));
    codes(isa);
  }
  halves(isas);
  return finish("attention_pages_test");
}
