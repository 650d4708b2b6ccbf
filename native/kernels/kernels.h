// The seam between kernels and runtime: what each kernel family offers, as tables of function
// pointers, one table per instruction set. Includes no Python and no SIMD.
//
// The numeric contract (version kNumericVersion): every function of a table gives the same bits on
// every instruction set, for every number of rows and threads. How:
//   - SIMD lanes are output columns (linear), tokens (QK) or head dimensions (PV).
//   - A block's partial sum is an exact integer; floats fold per lane in ascending K with explicit
//     fma; nothing is summed across lanes except by the fixed 16-lane tree of simd.h.
//   - Denormals are flushed (MXCSR FTZ|DAZ, set in every thread by the runtime).
//   - A bf16 dot product is two fp32 fmas, odd element first; rounding to bf16 is nearest-even.
#pragma once

#include <cstddef>
#include <cstdint>

namespace invar {

constexpr int kNumericVersion = 1;

// ---------------------------------------------------------------- weights and activations

enum class WeightFormat : int {
  f32,
  f16,
  bf16,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
  iq1_s,
  iq1_m,
  iq2_xxs,
  iq2_xs,
  iq2_s,
  iq3_xxs,
  iq3_s,
  tq1_0,
  tq2_0,
  int4_zp,
  int8_zp,
  int8,
  fp8,
  nvfp4,
  count
};
constexpr const char* kWeightFormatNames[] = {
    "f32",   "f16",     "bf16",    "q4_0",   "q4_1",  "q5_0",    "q5_1",   "q8_0",
    "q2_k",  "q3_k",    "q4_k",    "q5_k",   "q6_k",  "iq4_nl",  "iq4_xs", "mxfp4",
    "iq1_s", "iq1_m",   "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",  "tq1_0",
    "tq2_0", "int4_zp", "int8_zp", "int8",   "fp8",   "nvfp4"};
static_assert(sizeof kWeightFormatNames == sizeof(char*) * (int)WeightFormat::count);

enum class ActFormat : int { f32, bf16, q8_32, q8_256, q8_row, q8_16 };

constexpr int kPanelColumns = 32;  // 2 x 16 lanes (AVX-512), 4 x 8 (AVX2), 8 x 4 (NEON)

// A row of activations, all parts in one run of `row_bytes` bytes, 64-byte aligned:
//   f32     float[k]
//   bf16    uint16[k rounded up to 2], zero padded | the same values as float
//   q8_32   int8 codes[k] | float scale[k/32]  | int16 start[k/32][2] | float scaled_sum[k/32]
//   q8_256  int8 codes[k] | float scale[k/256] | int16 start[k/16][2] | int16 sum[k/32]
//   q8_row  int8 codes[k rounded up to 4], zero padded | float scale | int32 start
//   q8_16   int8 codes[k] | float scale[k/16]  | int16 start[k/16][2]
// codes = nearest-even(x / scale) with scale = max|x| / 127 over the block (scale 0: codes 0);
// computed as x * (127 / max|x|), scale = max|x| * (1/127) in fp32; a scale that would be denormal
// is 0; a block that holds inf or NaN has scale NaN and codes 0, so that its outputs are NaN.
// start = -8 (q8_32, q8_16) or -32 (q8_256) times the exact sum of the codes at K % 4 in {0, 1} and
// in {2, 3}: where dot.h starts its sums, the weights' bias being a multiple of it. scaled_sum =
// scale * float(exact sum). The one block of q8_row is the row, its start -128 times the sum of all
// codes. Each part starts on a 64-byte boundary; 64 bytes are added when the
// total is a multiple of 4096, since rows a power of two apart alias in L1.
struct ActLayout {
  int64_t scale_offset, sum_offset, scaled_sum_offset, widened_offset, row_bytes;
};
ActLayout act_layout(ActFormat format, int64_t k);

// Blocks of 32: q8_32; of 256: q8_256; rows of int8: q8_row; of fp8: f32; of nvfp4: q8_16.
ActFormat act_format_of(WeightFormat format);

// Packed weights: ceil(n / 32) panels, each `panel_bytes` long (a multiple of 64); columns past n
// have zero scales. A panel is one sequential stream of records; the layouts are in records.h.
int64_t panel_bytes(WeightFormat format, int64_t k);
int64_t row_bytes_ggml(WeightFormat format, int64_t k);  // of the unpacked row, as in records.h

struct LinearKernels {
  // Packs panels [first, last) of a weight matrix [n, k] in GGML row layout.
  void (*pack)(WeightFormat, const uint8_t* rows, int64_t n, int64_t k, int64_t first, int64_t last,
               uint8_t* out);
  // fp32 values of one GGML row (embedding lookup): exactly ggml's formula in fp32.
  void (*dequantize_row)(WeightFormat, const uint8_t* row, int64_t k, float* out);
  // A row of fp32 values, all finite, in a format that weights are brought to when a model is
  // loaded (encode_row.h); false: there is no encoder for it.
  bool (*encode_row)(WeightFormat, const float* x, int64_t k, uint8_t* row);
  // Columns [first, first + count) of an activation row, from their fp32 values x[count]. Both are
  // whole blocks of the format; blocks know nothing of each other, so that a row quantised in
  // pieces has the bits of a row quantised at once.
  void (*quantize_columns)(ActFormat, const ActLayout&, const float* x, int64_t first,
                           int64_t count, uint8_t* row);
  // A whole row of k columns.
  void quantize(ActFormat format, const float* x, int64_t k, uint8_t* row) const {
    quantize_columns(format, act_layout(format, k), x, 0, k, row);
  }
  // out[r * out_stride + c] = activations[r] . panel column c, for r in [0, rows), c in [0, 32):
  // one panel, all of K. Activation rows lie act_stride bytes apart, outputs out_stride floats.
  // Splits rows into register tiles itself; a row's bits do not depend on `rows`.
  void (*gemm)(WeightFormat, const uint8_t* panel, int64_t k, const uint8_t* act,
               int64_t act_stride, int rows, float* out, int64_t out_stride);
};

// ---------------------------------------------------------------- rows

// swiglu_oai: (up + 1) * gate * sigmoid(1.702 gate) with gate <= 7 and |up| <= 7, as in GPT-OSS.
enum class Activation : int { silu, gelu_tanh, gelu, swiglu_oai };
enum class RopeStyle : int { interleaved, half };  // pairs (2i, 2i+1); pairs (i, i + dim/2)

struct RowKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight, the sum of squares by the fixed 16-lane tree.
  // out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  // out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, the last two by fma;
  // both sums by the tree of rms_norm. out may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                     float* out);
  void (*add)(const float* a, const float* b, int64_t n, float* out);  // out may be a or b
  void (*scale)(const float* x, float factor, int64_t n, float* out);
  void (*gated)(Activation, const float* gate, const float* up, int64_t n, float* out);
  // Without a second factor, which swiglu_oai does not exist without. out may be x.
  void (*activate)(Activation, const float* x, int64_t n, float* out);
  void (*soft_cap)(const float* x, float cap, int64_t n, float* out);  // cap * tanh(x / cap)
  // out = fma(x, factor, y); out may be x or y
  void (*add_scaled)(const float* x, float factor, const float* y, int64_t n, float* out);
  void (*sigmoid)(const float* x, int64_t n, float* out);  // out may be x
  void (*softmax)(const float* x, int64_t n, float* out);  // out may be x
  // cos/sin table of one position: angle_i = position * inv_freq[i] in double, times magnitude,
  // rounded to fp32; out = cos[pairs] then sin[pairs].
  void (*rope_table)(int64_t position, const double* inv_freq, double magnitude, int64_t pairs,
                     float* out);
  // In place on one head of `dim` floats; the first 2 * pairs dimensions rotate.
  void (*rope)(RopeStyle, const float* table, int64_t pairs, int64_t dim, float* head);
};

// ---------------------------------------------------------------- attention over pages

constexpr int kPageTokens = 32;
constexpr int kTileTokens = 64;     // tiles at absolute positions
constexpr int kSplitTokens = 1024;  // splits at absolute positions, merged in ascending order

// How K and V are stored; attention_pages.h has the layouts.
//   bf16  rounded to nearest even; q and the probabilities, which meet them, too
//   fp16  rounded to nearest even, infinity from 65,520 on; products are fp32 fmas of fp32 q and p
//   int8  codes = nearest-even(x / scale) with a scale for K and one for V of a token and head,
//   made
//         as those of activations (above); products are fp32 fmas of the codes with fp32 operands.
//         The scale of K multiplies the finished logit, that of V the probability.
enum class KVFormat : int { bf16, fp16, int8, count };
constexpr const char* kKVFormatNames[] = {"bf16", "fp16", "int8"};
static_assert(sizeof kKVFormatNames == sizeof(char*) * (int)KVFormat::count);

// One page of one layer and KV head.
constexpr int64_t kv_head_bytes(KVFormat format, int64_t head_dim) {
  const int64_t values = kPageTokens * head_dim * 2;
  return format == KVFormat::int8 ? values + kPageTokens * 2 * 4 : values * 2;
}

// Where page `id` of a cache group lies: slabs of the arena hold pages_per_slab pages each.
struct PageMap {
  uint8_t* arena;
  int64_t slab_bytes;
  int64_t page_bytes;
  int32_t pages_per_slab;
  uint8_t* at(int32_t id) const {
    return arena + (id / pages_per_slab) * slab_bytes + (id % pages_per_slab) * page_bytes;
  }
};

// Which keys a query sees: all up to itself; the last `window` of these; or, in chunks, those of
// its own run of `window` tokens.
struct AttentionMask {
  int64_t window = 0;  // 0: all
  bool chunked = false;

  int64_t first_key(int64_t position) const {
    if (window <= 0) return 0;
    if (chunked) return position / window * window;
    return position < window ? 0 : position - window + 1;
  }
  // Behind the last query that sees the key at `position` or one before it.
  int64_t last_query(int64_t position) const {
    if (window <= 0) return INT64_MAX;
    return chunked ? (position / window + 1) * window : position + window;
  }
};

struct AttentionItem {
  const float* q;  // [tokens] rows, q_stride floats apart; each row [group, head_dim]
  int64_t q_stride;
  float* out;  // [tokens] rows, out_stride floats apart; each row [group, head_dim]
  int64_t out_stride;
  int32_t tokens;          // query tokens of this item
  int32_t group;           // query heads that share this KV head
  int32_t head_dim;        // a multiple of 16, at most 576 (latent attention)
  int64_t first_position;  // of the first query token; token t sees keys [0, first_position + t]
  AttentionMask mask;
  float scale;         // of the logits, before soft_cap
  float soft_cap;      // 0: none
  const float* sinks;  // [group]: a logit more in the softmax of a head, of no value; or null
  PageMap pages;
  const int32_t* block_table;
  int64_t offset_in_page;  // of this layer and KV head
  void* workspace;         // attention_workspace_bytes(...) bytes, 64-byte aligned, per thread
};

// Of one KVFormat.
struct AttentionKernels {
  // K and V of one token into its page at `slot` in [0, 32).
  void (*store)(const float* k, const float* v, int32_t head_dim, int32_t slot, uint8_t* page);
  // q is scaled by scale * log2(e) (no soft cap), the probabilities are 2^(s - m); both are then
  // what the format multiplies (KVFormat). Logits are fp32, l sums the fp32 probabilities. Splits
  // start from identity and merge in ascending order; a masked token enters no arithmetic, so that
  // wholly masked tiles leave (m, l, o) untouched and what lies past the tokens written is never
  // looked at. A sink joins at the very end, as a split of its own with m = sink, l = 1 and o = 0.
  void (*run)(const AttentionItem&);
  int64_t (*workspace_bytes)(int32_t max_tokens, int32_t group, int32_t head_dim);
  // The same bits in parts, which several threads may share: split `split` of the item's keys into
  // a partial of attention_partial_bytes(...); then the partials of all splits that the item sees,
  // in ascending order and next to each other, into item.out.
  void (*run_split)(const AttentionItem&, int64_t split, uint8_t* partial);
  void (*merge)(const AttentionItem&, uint8_t* partials, int64_t splits);
};

// (m, l, o) of every row of an item over one split, 64-byte aligned.
constexpr int64_t attention_partial_bytes(int64_t rows, int64_t head_dim) {
  return (rows * (head_dim + 2) * 4 + 63) / 64 * 64;
}

// ---------------------------------------------------------------- sampling

struct SampleRow {
  // draw
  float temperature;  // 0: greedy
  int32_t top_k;      // 0: off
  float top_p;        // 1: off
  float min_p;        // 0: off
  uint64_t seed;
  uint32_t choice;                                                // choice index
  uint32_t position;                                              // position in the output
  float repetition_penalty, frequency_penalty, presence_penalty;  // 1, 0, 0: off
  const int32_t* history;  // prompt then output ids; read only when a penalty is on
  int64_t history_len;
  int64_t prompt_len;  // ids of the prompt at the start of history
  const int32_t* bias_ids;
  const float* bias_values;  // added to logits; -inf forbids
  int64_t bias_len;
  const uint32_t* mask;  // bit per id, 1 allowed; null: all
  // report
  bool score;  // do not draw: the token is `score_token` (prompt log-probabilities)
  int32_t score_token;
  int32_t top_logprobs;  // how many of the highest to report, at most kMaxTopLogprobs
};
constexpr int kMaxTopLogprobs = 64;

struct SampleResult {
  int32_t token;
  float logprob;     // of raw logits: before penalties, bias, mask and temperature
  int32_t rank;      // 1 = the highest raw logit
  bool finite;       // false: a logit was NaN or nothing was allowed; token is undefined
  int32_t* top_ids;  // [top_logprobs], by (logit descending, id ascending)
  float* top_logprobs;
};

struct SamplingKernels {
  // logits [vocab] are not changed. workspace: sampling_workspace_bytes(vocab), per thread; it is
  // all zero before the first call and left so.
  void (*sample)(const float* logits, int64_t vocab, const SampleRow&, SampleResult&,
                 void* workspace);
  int64_t (*workspace_bytes)(int64_t vocab);
};

// ---------------------------------------------------------------- tables

struct Kernels {
  const char* isa;  // "portable", "avx2", "avx512"
  const LinearKernels* linear;
  const RowKernels* rows;
  const AttentionKernels* attention;  // [KVFormat]
  const SamplingKernels* sampling;

  const AttentionKernels& attention_over(KVFormat format) const { return attention[(int)format]; }
};

#define INVAR_DECLARE_TABLES(isa)                    \
  namespace isa {                                    \
  extern const LinearKernels linear_kernels;         \
  extern const RowKernels row_kernels;               \
  extern const AttentionKernels attention_kernels[]; \
  extern const SamplingKernels sampling_kernels;     \
  }
INVAR_DECLARE_TABLES(portable)
INVAR_DECLARE_TABLES(avx2)
INVAR_DECLARE_TABLES(avx512)

}  // namespace invar
