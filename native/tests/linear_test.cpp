// Linear kernels: pack, dequantize_row, quantize and gemm of every instruction set this CPU has,
// against scalar references, and against each other to the bit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernels.h"

using namespace invar;

namespace {

int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 40) printf("FAILED: %s\n", what.c_str());
}

const char* kNames[] = {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k"};
constexpr int kFormats = (int)WeightFormat::count;

struct Isa {
  const char* name;
  const LinearKernels* kernels;
};

std::vector<Isa> instruction_sets() {
  std::vector<Isa> r = {{"portable", &portable::linear_kernels}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    r.push_back({"avx2", &avx2::linear_kernels});
  else
    printf("skipped: avx2 (not on this CPU)\n");
#if defined(INVAR_EMULATED)  // the avx512 kernels were compiled with tests/emulated/immintrin.h
  r.push_back({"avx512 (emulated)", &avx512::linear_kernels});
#else
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    r.push_back({"avx512", &avx512::linear_kernels});
  else
    printf("skipped: avx512 (not on this CPU)\n");
#endif
#endif
  return r;
}

// ---------------------------------------------------------------- scalar references

double half_value(uint16_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  double x = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -x : x;
}
uint16_t u16(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

struct Value {  // a weight as scale * (code - bias) + offset, all of them exact in double
  double scale, code, offset;
  double value() const { return scale * code + offset; }
};

// Element i of a GGML row, from the format's description.
Value element(WeightFormat f, const uint8_t* row, int64_t i) {
  const int64_t b32 = i / 32, e = i % 32;
  auto nibble = [&](const uint8_t* q) { return e < 16 ? q[e] & 15 : q[e - 16] >> 4; };
  switch (f) {
    case WeightFormat::f32: {
      float x;
      memcpy(&x, row + 4 * i, 4);
      return {1, x, 0};
    }
    case WeightFormat::f16:
      return {1, half_value(u16(row + 2 * i)), 0};
    case WeightFormat::bf16: {
      uint32_t bits = (uint32_t)u16(row + 2 * i) << 16;
      float x;
      memcpy(&x, &bits, 4);
      return {1, x, 0};
    }
    case WeightFormat::q4_0: {
      const uint8_t* p = row + b32 * 18;
      return {half_value(u16(p)), (double)nibble(p + 2) - 8, 0};
    }
    case WeightFormat::q4_1: {
      const uint8_t* p = row + b32 * 20;
      return {half_value(u16(p)), (double)nibble(p + 4), half_value(u16(p + 2))};
    }
    case WeightFormat::q5_0: {
      const uint8_t* p = row + b32 * 22;
      int high = p[2 + e / 8] >> (e % 8) & 1;
      return {half_value(u16(p)), (double)(nibble(p + 6) + 16 * high) - 16, 0};
    }
    case WeightFormat::q8_0: {
      const uint8_t* p = row + b32 * 34;
      return {half_value(u16(p)), (double)(int8_t)p[2 + e], 0};
    }
    case WeightFormat::q4_k: {
      const uint8_t* p = row + i / 256 * 144;
      int g = (int)(i % 256 / 32), scale, min;
      const uint8_t* s = p + 4;
      if (g < 4) {
        scale = s[g] & 63, min = s[g + 4] & 63;
      } else {
        scale = (s[g + 4] & 15) + 16 * (s[g - 4] >> 6);
        min = (s[g + 4] >> 4) + 16 * (s[g] >> 6);
      }
      int byte = p[16 + g / 2 * 32 + e], q = g % 2 ? byte >> 4 : byte & 15;
      return {half_value(u16(p)) * scale, (double)q, -half_value(u16(p + 2)) * min};
    }
    case WeightFormat::q6_k: {
      const uint8_t* p = row + i / 256 * 210;
      int64_t x = i % 256, n = x / 128, l = x % 32, part = x % 128 / 32;
      int low = p[n * 64 + l + 32 * (part & 1)];
      low = part < 2 ? low & 15 : low >> 4;
      int high = p[128 + n * 32 + l] >> (2 * part) & 3;
      return {half_value(u16(p + 208)) * (int8_t)p[192 + x / 16], (double)(low + 16 * high) - 32,
              0};
    }
    case WeightFormat::count:
      break;
  }
  return {};
}

// ---------------------------------------------------------------- data

struct Bytes {  // 64-byte aligned
  uint8_t* p;
  size_t size;
  explicit Bytes(size_t n, int fill = 0) : size((n + 64) / 64 * 64) {
    p = (uint8_t*)std::aligned_alloc(64, size);
    memset(p, fill, size);
  }
  ~Bytes() { std::free(p); }
  Bytes(const Bytes&) = delete;
};

int64_t block_bytes(WeightFormat f) {
  return row_bytes_ggml(f, f == WeightFormat::q4_k || f == WeightFormat::q6_k ? 256 : 32);
}

// Random codes; scales that are small, positive or negative starts (subnormal ones among them).
void random_rows(WeightFormat f, Bytes& rows, int64_t n, int64_t k, std::mt19937& rng,
                 bool extreme) {
  const int64_t bytes = row_bytes_ggml(f, k) * n;
  std::normal_distribution<float> normal;
  if (f == WeightFormat::f32 || f == WeightFormat::bf16) {
    for (int64_t i = 0; i < n * k; i++) {
      float x = normal(rng);
      if (f == WeightFormat::f32)
        memcpy(rows.p + 4 * i, &x, 4);
      else
        memcpy(rows.p + 2 * i, (uint8_t*)&x + 2, 2);
    }
    return;
  }
  auto half = [&] {
    if (rng() % 16 == 0) return (uint16_t)(rng() & 0x83ff);
    return (uint16_t)((rng() & 0x8000) | (0x1800 + rng() % 0x1400));
  };
  if (f == WeightFormat::f16) {
    for (int64_t i = 0; i < n * k; i++) {
      uint16_t h = half();
      memcpy(rows.p + 2 * i, &h, 2);
    }
    return;
  }
  for (int64_t i = 0; i < bytes; i++) rows.p[i] = (uint8_t)rng();
  const int64_t step = block_bytes(f);
  for (int64_t b = 0; b < bytes / step; b++) {
    uint8_t* p = rows.p + b * step;
    if (extreme) memset(p, rng() % 2 ? 0xff : rng() % 2 ? 0x80 : 0, (size_t)step);
    uint16_t d = half(), m = half();
    if (f == WeightFormat::q6_k) {
      memcpy(p + 208, &d, 2);
    } else {
      memcpy(p, &d, 2);
      if (f == WeightFormat::q4_1 || f == WeightFormat::q4_k) memcpy(p + 2, &m, 2);
    }
  }
}

std::vector<float> random_x(int64_t n, std::mt19937& rng, bool extreme) {
  std::normal_distribution<float> normal;
  std::vector<float> x((size_t)n);
  for (auto& v : x) v = extreme ? (rng() % 2 ? 1.0f : -1.0f) : normal(rng);
  if (extreme)
    for (size_t i = 0; i < x.size(); i++)
      if (i / 96 % 3 == 0) x[i] = 1.0f;
  return x;
}

// ---------------------------------------------------------------- tests

void test_dequantize(const std::vector<Isa>& isas, std::mt19937& rng) {
  for (int fi = 0; fi < kFormats; fi++) {
    auto f = (WeightFormat)fi;
    const int64_t k = 512;
    Bytes rows((size_t)row_bytes_ggml(f, k));
    random_rows(f, rows, 1, k, rng, false);
    for (const Isa& isa : isas) {
      std::vector<float> out((size_t)k + 1, -7.0f);
      isa.kernels->dequantize_row(f, rows.p, k, out.data());
      int bad = 0;
      for (int64_t i = 0; i < k; i++) {
        Value v = element(f, rows.p, i);
        // fp32: scale (one rounding), times code (one), plus offset (two)
        volatile float s = (float)v.scale, q = (float)v.code, m = (float)v.offset;
        volatile float product = s * q;
        float want = product + m;
        if (f == WeightFormat::f32 || f == WeightFormat::f16 || f == WeightFormat::bf16) want = q;
        bad += !(want == out[(size_t)i]);
      }
      check(bad == 0, std::string("dequantize_row ") + kNames[fi] + " " + isa.name + ": " +
                          std::to_string(bad) + " of 512 differ");
      check(out[(size_t)k] == -7.0f,
            std::string("dequantize_row wrote past its end: ") + kNames[fi]);
    }
  }
}

// Every column of every panel must hold its row's elements: a unit activation reads element by
// element.
void test_pack_columns(const std::vector<Isa>& isas, std::mt19937& rng) {
  for (int fi = 0; fi < kFormats; fi++) {
    auto f = (WeightFormat)fi;
    const int64_t k = 256, n = 45, panels = 2;
    Bytes rows((size_t)(row_bytes_ggml(f, k) * n));
    random_rows(f, rows, n, k, rng, false);
    const int64_t pb = panel_bytes(f, k);
    check(pb % 64 == 0, std::string("panel_bytes not whole lines: ") + kNames[fi]);
    Bytes base((size_t)(pb * panels), 0xee);
    for (const Isa& isa : isas) {
      Bytes packed((size_t)(pb * panels) + 64, 0xee);
      isa.kernels->pack(f, rows.p, n, k, 1, 2, packed.p + pb);
      check(packed.p[0] == 0xee && packed.p[pb - 1] == 0xee,
            std::string("pack wrote panel 0: ") + kNames[fi]);
      isa.kernels->pack(f, rows.p, n, k, 0, 1, packed.p);
      check(packed.p[pb * panels] == 0xee, std::string("pack wrote past its end: ") + kNames[fi]);
      if (isa.kernels == isas[0].kernels)
        memcpy(base.p, packed.p, (size_t)(pb * panels));
      else
        check(memcmp(base.p, packed.p, (size_t)(pb * panels)) == 0,
              std::string("pack differs: ") + kNames[fi] + " " + isa.name);
      const ActFormat af = act_format_of(f);
      Bytes act((size_t)act_layout(af, k).row_bytes);
      double worst = 0;
      for (int64_t i = 0; i < k; i += 7) {
        std::vector<float> x((size_t)k, 0.0f);
        x[(size_t)i] = 127.0f;  // scale 1: the code is 127
        isa.kernels->quantize(af, x.data(), k, act.p);
        float out[64];
        for (int64_t p = 0; p < panels; p++)
          isa.kernels->gemm(f, packed.p + p * pb, k, act.p, act_layout(af, k).row_bytes, 1,
                            out + 32 * p, 32);
        for (int64_t c = 0; c < 64; c++) {
          Value v = c < n ? element(f, rows.p + c * row_bytes_ggml(f, k), i) : Value{};
          double want = 127 * v.value();
          double size =
              127 * (std::fabs(v.scale * v.code) + std::fabs(v.offset) + std::fabs(v.scale));
          double error = std::fabs(out[c] - want);
          worst = std::max(worst, size > 0 ? error / size : error);
        }
      }
      check(worst < 1e-6, std::string("pack: wrong element ") + kNames[fi] + " " + isa.name + " " +
                              std::to_string(worst));
    }
  }
}

void test_quantize(const std::vector<Isa>& isas, std::mt19937& rng) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const int64_t k = 1024;
  for (ActFormat f : {ActFormat::f32, ActFormat::bf16, ActFormat::q8_32, ActFormat::q8_256}) {
    const ActLayout layout = act_layout(f, k);
    check(layout.row_bytes % 64 == 0 && layout.row_bytes % 4096 != 0, "act_layout: row_bytes");
    std::vector<std::vector<float>> cases;
    cases.push_back(random_x(k, rng, false));
    cases.push_back(std::vector<float>((size_t)k, 0.0f));
    cases.push_back(std::vector<float>((size_t)k, 3e38f));
    cases.push_back(std::vector<float>((size_t)k, 1e-40f));    // denormal
    cases.push_back(std::vector<float>((size_t)k, 1.4e-36f));  // its scale would be denormal
    cases.push_back(std::vector<float>((size_t)k, 1.6e-36f));  // its scale is just normal
    std::vector<float> ties((size_t)k);
    for (size_t i = 0; i < ties.size(); i++)
      ties[i] = i % 32 ? (float)(int)(i % 32) - 16 + 0.5f : 127.0f;
    cases.push_back(ties);
    for (float bad : {inf, -inf, nan}) {
      std::vector<float> x = random_x(k, rng, false);
      x[37] = bad;
      cases.push_back(x);
    }
    for (size_t n = 0; n < cases.size(); n++) {
      const std::vector<float>& x = cases[n];
      Bytes first((size_t)layout.row_bytes, 0xcc);
      for (const Isa& isa : isas) {
        Bytes out((size_t)layout.row_bytes, 0xcc);
        isa.kernels->quantize(f, x.data(), k, out.p);
        std::string where = std::string(isa.name) + " format " + std::to_string((int)f) + " case " +
                            std::to_string(n);
        if (isa.kernels == isas[0].kernels)
          memcpy(first.p, out.p, out.size);
        else
          check(memcmp(first.p, out.p, (size_t)layout.row_bytes) == 0,
                "quantize differs from portable: " + where);
        if (f == ActFormat::f32 || f == ActFormat::bf16) continue;
        const int64_t block = f == ActFormat::q8_32 ? 32 : 256;
        const int8_t* codes = (const int8_t*)out.p;
        const float* scales = (const float*)(out.p + layout.scale_offset);
        const int16_t* starts = (const int16_t*)(out.p + layout.sum_offset);
        const int64_t group = f == ActFormat::q8_32 ? 32 : 16;
        const int unit = f == ActFormat::q8_32 ? -8 : -32;
        for (int64_t b = 0; b < k / block; b++) {
          float max = 0;
          bool finite = true;
          for (int64_t i = b * block; i < b * block + block; i++) {
            finite &= std::isfinite(x[(size_t)i]);
            max = std::max(max, std::fabs(x[(size_t)i]));
          }
          float scale = max * (1.0f / 127.0f), factor = 127.0f / max;
          if (!finite)
            check(std::isnan(scales[b]), "quantize: a bad block's scale is not NaN: " + where);
          else if (scale < std::numeric_limits<float>::min())
            check(scales[b] == 0, "quantize: scale of a tiny block: " + where), factor = 0;
          else
            check(scales[b] == scale, "quantize: scale: " + where);
          if (!finite) factor = 0;
          for (int64_t i = b * block; i < b * block + block; i++) {
            float v = x[(size_t)i] * factor;
            int want = factor == 0 ? 0 : (int)std::nearbyint(v);
            check(codes[i] == want, "quantize: code: " + where);
          }
        }
        for (int64_t g = 0; g < k / group; g++) {
          int s[2] = {0, 0};
          for (int64_t i = 0; i < group; i++) s[i % 4 / 2] += codes[g * group + i];
          check(starts[2 * g] == unit * s[0] && starts[2 * g + 1] == unit * s[1],
                "quantize: starts: " + where);
        }
        for (int64_t g = 0; g < k / 32; g++) {
          int s = 0;
          for (int64_t i = 0; i < 32; i++) s += codes[g * 32 + i];
          if (f == ActFormat::q8_256) {
            check(((const int16_t*)(out.p + layout.scaled_sum_offset))[g] == s,
                  "quantize: sum: " + where);
          } else {
            float got = ((const float*)(out.p + layout.scaled_sum_offset))[g],
                  want = scales[g] * (float)s;
            check(memcmp(&got, &want, 4) == 0 || std::isnan(want),
                  "quantize: scaled sum: " + where);
          }
        }
      }
    }
  }
}

// What the activation row says x is, in double.
std::vector<double> activation_values(ActFormat f, const uint8_t* row, int64_t k) {
  const ActLayout layout = act_layout(f, k);
  std::vector<double> r((size_t)k);
  for (int64_t i = 0; i < k; i++) {
    if (f == ActFormat::f32) {
      r[(size_t)i] = ((const float*)row)[i];
    } else if (f == ActFormat::bf16) {
      uint32_t bits = (uint32_t)((const uint16_t*)row)[i] << 16;
      float x;
      memcpy(&x, &bits, 4);
      r[(size_t)i] = x;
    } else {
      const int64_t block = f == ActFormat::q8_32 ? 32 : 256;
      r[(size_t)i] =
          (double)((const int8_t*)row)[i] * ((const float*)(row + layout.scale_offset))[i / block];
    }
  }
  return r;
}

uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}

void test_gemm(const std::vector<Isa>& isas, WeightFormat f, int64_t k, int64_t n, bool extreme,
               std::mt19937& rng) {
  const int max_rows = 65;
  const int64_t row_bytes = row_bytes_ggml(f, k), panels = (n + 31) / 32, pb = panel_bytes(f, k);
  const ActFormat af = act_format_of(f);
  const int64_t act_stride = act_layout(af, k).row_bytes + 64;
  const std::string where = std::string(kNames[(int)f]) + " k=" + std::to_string(k) +
                            " n=" + std::to_string(n) + (extreme ? " extreme" : "");
  Bytes rows((size_t)(row_bytes * n)), packed((size_t)(pb * panels));
  random_rows(f, rows, n, k, rng, extreme);
  isas[0].kernels->pack(f, rows.p, n, k, 0, panels, packed.p);
  Bytes act((size_t)(act_stride * max_rows), 0xff);  // padding between rows is NaN
  for (int r = 0; r < max_rows; r++) {
    std::vector<float> x = random_x(k, rng, extreme);
    isas[0].kernels->quantize(af, x.data(), k, act.p + r * act_stride);
  }

  // reference and tolerance, rows 0, 1 and 64
  std::vector<double> want((size_t)(max_rows * n)), size((size_t)(max_rows * n));
  for (int r : {0, 1, 64}) {
    std::vector<double> a = activation_values(af, act.p + r * act_stride, k);
    for (int64_t c = 0; c < n; c++) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < k; i++) {
        Value v = element(f, rows.p + c * row_bytes, i);
        sum += v.value() * a[(size_t)i];
        magnitude += (std::fabs(v.scale * v.code) + std::fabs(v.offset)) * std::fabs(a[(size_t)i]);
      }
      want[(size_t)(r * n + c)] = sum;
      size[(size_t)(r * n + c)] = magnitude;
    }
  }
  // Each fp32 rounding is eps/2 of a partial sum no larger than sum |w a|; roundings in a chain:
  // per 32-block 4 (d*da, fma, and for a minimum scaled_sum and fma), per 256 at most 6, else per K
  // two within a chunk of 512 and one per chunk.
  double chain = f <= WeightFormat::bf16   ? 2.0 * std::min<int64_t>(k, 512) + (double)k / 512 + 2
                 : f <= WeightFormat::q8_0 ? 4.0 * (double)k / 32 + 4
                                           : 6.0 * (double)k / 256 + 6;
  const double tolerance = chain * std::ldexp(1, -24);

  const int64_t out_stride = panels * 32 + 16;
  std::vector<float> base;
  for (const Isa& isa : isas) {
    for (int count : {65, 1, 2, 3, 4, 5, 6, 7, 16, 64}) {
      for (int start : {0, 1}) {
        if (start + count > max_rows) continue;
        std::vector<float> out((size_t)(out_stride * (count + 2)), -12345.0f);
        float* o = out.data() + out_stride;
        for (int64_t p = 0; p < panels; p++)
          isa.kernels->gemm(f, packed.p + p * pb, k, act.p + start * act_stride, act_stride, count,
                            o + p * 32, out_stride);
        std::string call = where + " " + isa.name + " rows=" + std::to_string(count) +
                           " start=" + std::to_string(start);
        bool guards = true;
        for (int64_t i = 0; i < (int64_t)out.size(); i++) {
          int64_t r = i / out_stride - 1, c = i % out_stride;
          if (r < 0 || r >= count || c >= panels * 32) guards &= out[(size_t)i] == -12345.0f;
        }
        check(guards, "gemm wrote outside its rows: " + call);
        if (base.empty()) base.assign(o, o + out_stride * max_rows);
        int differ = 0;
        for (int r = 0; r < count; r++)
          for (int64_t c = 0; c < n; c++)
            differ += bits_of(o[r * out_stride + c]) !=
                      bits_of(base[(size_t)((r + start) * out_stride + c)]);
        check(differ == 0, "gemm bits differ from portable with 65 rows: " + call + ": " +
                               std::to_string(differ));
        for (int r : {0, 1, 64}) {
          if (r - start < 0 || r - start >= count) continue;
          for (int64_t c = 0; c < n; c++) {
            size_t i = (size_t)(r * n + c);
            double error = std::fabs(o[(r - start) * out_stride + c] - want[i]);
            if (!(error <= tolerance * size[i])) {
              check(false, "gemm: " + call + " row " + std::to_string(r) + " column " +
                               std::to_string(c) + " is " +
                               std::to_string(o[(r - start) * out_stride + c]) + ", want " +
                               std::to_string(want[i]));
              break;
            }
          }
        }
      }
    }
    // The tolerance can fail: zeroed, doubled and shifted outputs are outside of it.
    int zero = 0, twice = 0, shifted = 0;
    for (int64_t c = 0; c + 1 < n; c++) {
      double t = tolerance * size[(size_t)c], w = want[(size_t)c];
      zero += std::fabs(w) > t;
      twice += std::fabs(w) > t;
      shifted += std::fabs(w - want[(size_t)c + 1]) > t;
    }
    check(n < 8 || extreme || (zero > n * 3 / 4 && twice > n * 3 / 4 && shifted > n * 3 / 4),
          "the tolerance accepts a wrong result: " + where);
  }
}

}  // namespace

int main() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ | DAZ, as the runtime does in every thread
#endif
  std::mt19937 rng(1);
  std::vector<Isa> isas = instruction_sets();
  test_dequantize(isas, rng);
  test_quantize(isas, rng);
  test_pack_columns(isas, rng);
  for (int fi = 0; fi < kFormats; fi++) {
    auto f = (WeightFormat)fi;
    const bool k_quant = f == WeightFormat::q4_k || f == WeightFormat::q6_k;
    if (fi <= (int)WeightFormat::bf16)
      for (int64_t k : {1, 2, 3, 31, 32, 511, 512, 513, 1100})
        test_gemm(isas, f, k, 35, false, rng);
    else if (k_quant)
      for (int64_t k : {256, 512, 2048}) test_gemm(isas, f, k, 35, false, rng);
    else
      for (int64_t k : {32, 64, 224, 256, 288, 576, 2048}) test_gemm(isas, f, k, 35, false, rng);
    for (int64_t n : {1, 31, 32, 64}) test_gemm(isas, f, 512, n, false, rng);
    test_gemm(isas, f, 512, 64, true, rng);
    printf("%-5s done\n", kNames[fi]);
  }
  printf(failures ? "%d FAILED\n" : "all passed\n", failures);
  return failures ? 1 : 0;
}
