// Linear kernels, what is done to single rows: dequantize_row, pack and quantize of every
// instruction set this CPU has, against scalar references, and against each other to the bit.
#include "linear_reference.h"

using namespace kernel_test;
using namespace linear_reference;

namespace {

constexpr int kFormats = (int)WeightFormat::count;

void test_dequantize(const std::vector<Isa>& isas, std::mt19937& rng) {
  for (int fi = 0; fi < kFormats; fi++) {
    auto f = (WeightFormat)fi;
    const int64_t k = 512;
    Bytes rows((size_t)row_bytes_ggml(f, k));
    random_rows(f, rows, 1, k, rng, false);
    for (const Isa& isa : isas) {
      std::vector<float> out((size_t)k + 1, -7.0f);
      isa.linear->dequantize_row(f, rows.p, k, out.data());
      int bad = 0;
      for (int64_t i = 0; i < k; i++) {
        const Element e = element(f, rows.p, k, i);
        const float want = e.d * (float)e.scale * e.code + e.m * (float)e.min;
        bad += !(want == out[(size_t)i]);
      }
      check(bad == 0, std::string("dequantize_row ") + name_of(f) + " " + isa.name + ": " +
                          std::to_string(bad) + " of 512 differ");
      check(out[(size_t)k] == -7.0f,
            std::string("dequantize_row wrote past its end: ") + name_of(f));
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
    check(pb % 64 == 0, std::string("panel_bytes not whole lines: ") + name_of(f));
    Bytes base((size_t)(pb * panels), 0xee);
    for (const Isa& isa : isas) {
      Bytes packed((size_t)(pb * panels) + 64, 0xee);
      isa.linear->pack(f, rows.p, n, k, 1, 2, packed.p + pb);
      check(packed.p[0] == 0xee && packed.p[pb - 1] == 0xee,
            std::string("pack wrote panel 0: ") + name_of(f));
      isa.linear->pack(f, rows.p, n, k, 0, 1, packed.p);
      check(packed.p[pb * panels] == 0xee, std::string("pack wrote past its end: ") + name_of(f));
      if (isa.linear == isas[0].linear)
        memcpy(base.p, packed.p, (size_t)(pb * panels));
      else
        check(memcmp(base.p, packed.p, (size_t)(pb * panels)) == 0,
              std::string("pack differs: ") + name_of(f) + " " + isa.name);
      const ActFormat af = act_format_of(f);
      Bytes act((size_t)act_layout(af, k).row_bytes);
      double worst = 0;
      for (int64_t i = 0; i < k; i += 7) {
        std::vector<float> x((size_t)k, 0.0f);
        x[(size_t)i] = 127.0f;  // scale 1: the code is 127
        isa.linear->quantize(af, x.data(), k, act.p);
        float out[64];
        for (int64_t p = 0; p < panels; p++)
          isa.linear->gemm(f, packed.p + p * pb, k, act.p, act_layout(af, k).row_bytes, 1,
                           out + 32 * p, 32);
        for (int64_t c = 0; c < 64; c++) {
          Element e = c < n ? element(f, rows.p + c * row_bytes_ggml(f, k), k, i) : Element{};
          double want = 127 * e.value();
          double unit = std::fabs((double)e.d * e.scale) * (f == WeightFormat::q5_1 ? 16 : 1);
          double size = 127 * (std::fabs(e.product()) + std::fabs(e.offset()) + unit);
          double error = std::fabs(out[c] - want);
          worst = std::max(worst, size > 0 ? error / size : error);
        }
      }
      check(worst < 1e-6, std::string("pack: wrong element ") + name_of(f) + " " + isa.name + " " +
                              std::to_string(worst));
    }
  }
}

// Every exponent of mxfp4, as a row looked up and as a column of weights: one that is 2^(e - 128),
// zero where that is denormal, infinite where the product is.
void test_mxfp4_exponents(const std::vector<Isa>& isas) {
  const WeightFormat f = WeightFormat::mxfp4;
  const int64_t k = 32, n = 256, panels = n / 32, row_bytes = row_bytes_ggml(f, k);
  Bytes rows((size_t)(row_bytes * n), 0x11);  // code 1 everywhere
  for (int64_t e = 0; e < n; e++) rows.p[e * row_bytes] = (uint8_t)e;
  std::vector<float> x((size_t)k, 0.0f);
  x[5] = 127.0f;
  const ActLayout layout = act_layout(act_format_of(f), k);
  Bytes act((size_t)layout.row_bytes), packed((size_t)(panels * panel_bytes(f, k)));
  for (const Isa& isa : isas) {
    isa.linear->quantize(act_format_of(f), x.data(), k, act.p);
    isa.linear->pack(f, rows.p, n, k, 0, panels, packed.p);
    int bad = 0;
    for (int64_t e = 0; e < n; e++) {
      float values[32], products[32];
      const float want = e < 2 ? 0 : std::ldexp(1.0f, (int)e - 128);
      isa.linear->dequantize_row(f, rows.p + e * row_bytes, k, values);
      isa.linear->gemm(f, packed.p + e / 32 * panel_bytes(f, k), k, act.p, layout.row_bytes, 1,
                       products, 32);
      bad += values[9] != want || products[e % 32] != 127 * want;
    }
    check(bad == 0, std::string("mxfp4 exponents ") + isa.name + ": " + std::to_string(bad));
  }
}

void test_quantize(const std::vector<Isa>& isas, std::mt19937& rng) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const int64_t k = 1024;
  for (ActFormat f :
       {ActFormat::f32, ActFormat::bf16, ActFormat::q8_32, ActFormat::q8_256, ActFormat::q8_16}) {
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
        isa.linear->quantize(f, x.data(), k, out.p);
        std::string where = std::string(isa.name) + " format " + std::to_string((int)f) + " case " +
                            std::to_string(n);
        if (isa.linear == isas[0].linear)
          memcpy(first.p, out.p, out.size);
        else
          check(memcmp(first.p, out.p, (size_t)layout.row_bytes) == 0,
                "quantize differs from portable: " + where);
        if (f == ActFormat::f32 || f == ActFormat::bf16) continue;
        const int64_t block = block_of(f);
        const int8_t* codes = (const int8_t*)out.p;
        const float* scales = (const float*)(out.p + layout.scale_offset);
        const int16_t* starts = (const int16_t*)(out.p + layout.sum_offset);
        const int64_t group = std::min<int64_t>(block, f == ActFormat::q8_256 ? 16 : 32);
        const int unit = f == ActFormat::q8_256 ? -32 : -8;
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
        for (int64_t g = 0; g < k / 32 && f != ActFormat::q8_16; g++) {
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

}  // namespace

int main() {
  flush_denormals();
  std::mt19937 rng(1);
  std::vector<Isa> isas = instruction_sets();
  test_dequantize(isas, rng);
  test_quantize(isas, rng);
  test_pack_columns(isas, rng);
  test_mxfp4_exponents(isas);
  return finish("linear_rows_test");
}
