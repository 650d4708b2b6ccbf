// Attention over pages of every format: double reference, and the invariances of law 1 to the bit.
// How the values of a token lie in a page is tested in attention_pages_test.cpp.
#include "tests/attention_reference.h"

using namespace invar;
using namespace kernel_test;

namespace {

struct Shape {
  int32_t group, head_dim;
  int64_t window;
  float soft_cap;
  KVFormat format = KVFormat::bf16;
  bool chunked = false, sinks = false;
  AttentionMask mask() const { return {window, chunked}; }
  int64_t first_key(int64_t position) const {  // by counting down
    int64_t key = position;
    while (key > 0 && (chunked ? key % window != 0 : window == 0 || position - key + 1 < window))
      key--;
    return key;
  }
  float sink(int32_t head) const { return 1.5f - float(head); }
  std::string name() const {
    return std::string(kKVFormatNames[int(format)]) + " group=" + std::to_string(group) +
           " head_dim=" + std::to_string(head_dim) + " window=" + std::to_string(window) +
           " cap=" + std::to_string(soft_cap) + (chunked ? " chunked" : "") +
           (sinks ? " sinks" : "");
  }
};

// A sequence with keys and values of its own, in an arena whose pages are shuffled. Whatever was
// never stored is NaN, and a page that a window has passed is NaN again.
class Sequence {
 public:
  Sequence(const Isa& isa, const Shape& shape, int64_t length, uint32_t seed)
      : isa_(isa),
        kernels_(isa.attention[int(shape.format)]),
        shape_(shape),
        length_(length),
        random_(seed) {
    const int64_t width = int64_t(shape.group) * shape.head_dim;
    q_ = normal(random_, length * width);
    k_ = normal(random_, length * shape.head_dim);
    v_ = normal(random_, length * shape.head_dim);
    for (float& x : q_) x *= 2;  // peaked, so that maxima move and rescaling matters
    for (int64_t t = 0; t < length; t++) {
      const auto k = stored(shape.format, &k_[t * shape.head_dim], shape.head_dim);
      const auto v = stored(shape.format, &v_[t * shape.head_dim], shape.head_dim);
      k_stored_.insert(k_stored_.end(), k.begin(), k.end());
      v_stored_.insert(v_stored_.end(), v.begin(), v.end());
    }
    pages_ = int32_t((length + kPageTokens - 1) / kPageTokens);
    map_.page_bytes = head_bytes() + 128;
    map_.pages_per_slab = 3;
    map_.slab_bytes = 3 * map_.page_bytes + 64;
    arena_.assign((pages_ / 3 + 2) * map_.slab_bytes + 64, 0xff);  // NaN, in int8 its scales
    map_.arena =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(arena_.data()) + 63) / 64 * 64);
    table_.resize(pages_);
    for (int32_t i = 0; i < pages_; i++) table_[i] = pages_ - 1 - i;
    for (int32_t i = 0; i + 1 < pages_; i += 2) std::swap(table_[i], table_[pages_ - 1 - i]);
  }

  void store(int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      kernels_.store(&k_[t * shape_.head_dim], &v_[t * shape_.head_dim], shape_.head_dim,
                     int32_t(t % kPageTokens), page(t / kPageTokens));
  }
  // Tokens [from, to) hold infinities, as after an overflow in a later token of the same chunk.
  void store_infinite(int64_t from, int64_t to) {
    const std::vector<float> infinite(shape_.head_dim, kInf);
    for (int64_t t = from; t < to; t++)
      kernels_.store(infinite.data(), infinite.data(), shape_.head_dim, int32_t(t % kPageTokens),
                     page(t / kPageTokens));
  }
  // Head 0 of a token: logits of -infinity against every key.
  void overflow_query(int64_t token, float key_sign) {
    for (int64_t i = 0; i < shape_.head_dim; i++) {
      k_[token * shape_.head_dim + i] = key_sign;
      q_[token * width() + i] = -3e38f;
    }
  }
  void restore_queries(uint32_t seed) {
    std::mt19937 random(seed);
    q_ = normal(random, q_.size(), 1);
    for (float& x : q_) x *= 2;
  }
  // Pages below `first_key` are given back: their entries point nowhere.
  void free_below(int64_t first_key) {
    for (int64_t i = 0; (i + 1) * kPageTokens <= first_key; i++)
      if (table_[i] >= 0) {
        memset(page(i), 0xff, head_bytes());
        table_[i] = -1 << 24;
      }
  }

  // Tokens [from, to) in one item; `out` is [to - from][group][head_dim]. In parts: the splits by
  // themselves, the last first, and then merged.
  void run(int64_t from, int64_t to, float* out, bool in_parts = false) {
    const int64_t width = int64_t(shape_.group) * shape_.head_dim;
    AttentionItem item{};
    item.q = &q_[from * width];
    item.q_stride = width;
    item.out = out;
    item.out_stride = width;
    item.tokens = int32_t(to - from);
    item.group = shape_.group;
    item.head_dim = shape_.head_dim;
    item.first_position = from;
    item.mask = shape_.mask();
    std::vector<float> sinks;
    for (int32_t h = 0; h < shape_.group; h++) sinks.push_back(shape_.sink(h));
    item.sinks = shape_.sinks ? sinks.data() : nullptr;
    item.scale = scale();
    item.soft_cap = shape_.soft_cap;
    item.pages = map_;
    item.block_table = table_.data();
    item.offset_in_page = 64;
    const int64_t bytes = kernels_.workspace_bytes(item.tokens, shape_.group, shape_.head_dim);
    std::vector<uint8_t> workspace(bytes + 128 + 64, 0xff);
    uint8_t* base =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
    item.workspace = base;
    in_parts ? run_splits(item) : kernels_.run(item);
    for (int64_t i = bytes; i < bytes + 64; i++)
      if (base[i] != 0xff) {
        check(false, std::string(isa_.name) + " writes past its workspace, " + shape_.name());
        break;
      }
  }

  void run_splits(const AttentionItem& item) {
    const int64_t rows = int64_t(item.tokens) * item.group;
    const int64_t bytes = attention_partial_bytes(rows, item.head_dim);
    const int64_t first = shape_.first_key(item.first_position) / kSplitTokens;
    const int64_t count = (item.first_position + item.tokens - 1) / kSplitTokens + 1 - first;
    Guarded partials(count * bytes / 4, 0);
    for (int64_t i = count - 1; i >= 0; i--)
      kernels_.run_split(item, first + i, reinterpret_cast<uint8_t*>(partials.data()) + i * bytes);
    kernels_.merge(item, reinterpret_cast<uint8_t*>(partials.data()), count);
    check(partials.intact(), std::string(isa_.name) + " writes past its partials");
  }

  // Softmax in double over the keys and values as stored; *magnitude = sum of p |v|, for the bound.
  void reference(int64_t position, int32_t head, double* out, double* magnitude) const {
    const int64_t d = shape_.head_dim, width = shape_.group * d;
    const float factor = shape_.soft_cap > 0 ? scale() : scale() * 0x1.715476p+0f;
    const double back = shape_.soft_cap > 0 ? 1.0 : 1 / 1.4426950408889634;
    const int64_t first = shape_.first_key(position);
    std::vector<double> s(position + 1);
    double top = -1e300, sum = 0;
    for (int64_t t = first; t <= position; t++) {
      double dot = 0;
      for (int64_t i = 0; i < d; i++)
        dot += operand(shape_.format, q_[position * width + head * d + i] * factor) *
               k_stored_[t * d + i];
      dot *= back;
      s[t] = shape_.soft_cap > 0 ? shape_.soft_cap * std::tanh(dot / shape_.soft_cap) : dot;
      top = std::max(top, s[t]);
    }
    if (shape_.sinks) {
      top = std::max<double>(top, shape_.sink(head));
      sum = std::exp(shape_.sink(head) - top);
    }
    for (int64_t i = 0; i < d; i++) out[i] = magnitude[i] = 0;
    for (int64_t t = first; t <= position; t++) {
      const double p = std::exp(s[t] - top);
      sum += p;
      for (int64_t i = 0; i < d; i++) {
        out[i] += p * v_stored_[t * d + i];
        magnitude[i] += p * std::fabs(v_stored_[t * d + i]);
      }
    }
    for (int64_t i = 0; i < d; i++) out[i] /= sum, magnitude[i] /= sum;
  }

  int64_t width() const { return int64_t(shape_.group) * shape_.head_dim; }
  int64_t length() const { return length_; }

 private:
  float scale() const { return 1.0f / std::sqrt(float(shape_.head_dim)); }
  int64_t head_bytes() const { return kv_head_bytes(shape_.format, shape_.head_dim); }
  uint8_t* page(int64_t i) { return map_.at(table_[i]) + 64; }

  const Isa& isa_;
  const AttentionKernels& kernels_;
  Shape shape_;
  int64_t length_;
  std::mt19937 random_;
  std::vector<float> q_, k_, v_;
  std::vector<double> k_stored_, v_stored_;
  std::vector<uint8_t> arena_;
  std::vector<int32_t> table_;
  PageMap map_{};
  int32_t pages_;
};

// fp32 noise of logits up to about 40. Beside bf16 pages p is rounded as well (half an ulp, 2^-8
// relative) while the sum is not.
constexpr double kNoise = 40 * 8 * kEps;

bool near_reference(KVFormat format, const float* got, const std::vector<double>& want,
                    const std::vector<double>& magnitude) {
  const double tolerance = kNoise + (format == KVFormat::bf16 ? kBf16Eps : 0);
  for (size_t i = 0; i < want.size(); i++)
    if (!(std::fabs(got[i] - want[i]) <= tolerance * magnitude[i])) return false;
  return true;
}

void check_values(Sequence& s, const std::vector<float>& out, const Shape& shape,
                  const std::string& what) {
  const int32_t head_dim = shape.head_dim;
  std::vector<double> want(head_dim), magnitude(head_dim);
  auto near = [&](const float* x) { return near_reference(shape.format, x, want, magnitude); };
  for (int64_t t = 0; t < s.length(); t += t < 70 ? 1 : 37)
    for (int32_t h = 0; h < shape.group; h++) {
      s.reference(t, h, want.data(), magnitude.data());
      const float* got = &out[t * s.width() + h * head_dim];
      check(near(got), what + ": value at " + std::to_string(t));
      if (t % 32 != 5) continue;
      std::vector<float> zeroed(head_dim), doubled(got, got + head_dim), shifted(head_dim);
      std::vector<float> swollen(got, got + head_dim);
      for (float& x : doubled) x *= 2;
      for (float& x : swollen) x *= 1.01f;  // a percent: as much as a wrong scale of int8 may be
      for (int i = 0; i < head_dim; i++) shifted[i] = got[(i + 1) % head_dim];
      check(!near(zeroed.data()), what + ": a zeroed output passes");
      check(!near(doubled.data()), what + ": a doubled output passes");
      check(!near(shifted.data()), what + ": a shifted output passes");
      check(shape.format == KVFormat::bf16 || !near(swollen.data()),
            what + ": an output that is 1 % too large passes");
    }
}

// Decode one token at a time, storing as it goes, is the standard that everything else must match.
std::vector<float> decode_all(const Isa& isa, const Shape& shape, int64_t length, uint32_t seed) {
  Sequence s(isa, shape, length, seed);
  std::vector<float> out(length * s.width(), kNaN);
  for (int64_t t = 0; t < length; t++) {
    s.store(t, t + 1);
    s.free_below(shape.first_key(t));
    s.run(t, t + 1, &out[t * s.width()]);
  }
  return out;
}

void check_chunks(const Isa& isa, const Shape& shape, const std::vector<float>& want,
                  int64_t length, uint32_t seed, int64_t chunk, const std::string& what) {
  Sequence s(isa, shape, length, seed);
  Guarded out(length * s.width(), 0);
  for (int64_t t = 0; t < length; t += chunk) {
    const int64_t end = std::min(length, t + chunk);
    s.store(t, end);
    s.free_below(shape.first_key(t));
    s.run(t, end, out.data() + t * s.width());
  }
  check(same_bits(out.data(), want.data(), want.size()),
        what + ": chunks of " + std::to_string(chunk) + " differ from decode");
  check(out.intact(), what + ": wrote outside the output");
}

// Everything is in the cache already (a prefix hit): pages hold tokens far beyond the items.
void check_written_ahead(const Isa& isa, const Shape& shape, const std::vector<float>& want,
                         int64_t length, uint32_t seed, const std::string& what) {
  Sequence s(isa, shape, length, seed);
  s.store(0, length);
  std::vector<float> out(want.size(), kNaN);
  for (int64_t t = 0, size = 1; t < length; t += size, size = size % 32 + 3) {
    const int64_t end = std::min(length, t + size);
    s.run(t, end, &out[t * s.width()]);
  }
  check(same_bits(out.data(), want.data(), want.size()), what + ": written ahead");
}

void sweep(const std::vector<Isa>& isas) {
  std::vector<Shape> shapes;
  for (int32_t head_dim : {16, 32, 48, 64, 80, 96, 128, 256}) shapes.push_back({3, head_dim, 0, 0});
  shapes.push_back({2, 576, 0, 0});
  for (int32_t group = 1; group <= 8; group++) shapes.push_back({group, 64, 0, 0});
  for (int64_t window : {1, 2, 31, 32, 33, 64, 65, 100}) shapes.push_back({2, 32, window, 0});
  for (int64_t window : {1, 32, 48, 64, 100})
    shapes.push_back({2, 32, window, 0, KVFormat::bf16, true});
  shapes.push_back({3, 48, 0, 0, KVFormat::bf16, false, true});
  shapes.push_back({3, 48, 40, 9.0f, KVFormat::int8, false, true});
  shapes.push_back({3, 64, 0, 20.0f});
  shapes.push_back({4, 128, 48, 5.0f});
  for (KVFormat format : {KVFormat::fp16, KVFormat::int8}) {
    for (int32_t head_dim : {16, 48, 64, 256}) shapes.push_back({3, head_dim, 0, 0, format});
    for (int32_t group : {1, 2, 4, 6, 8}) shapes.push_back({group, 64, 0, 0, format});
    for (int64_t window : {1, 31, 33, 65}) shapes.push_back({2, 32, window, 0, format});
    shapes.push_back({4, 128, 48, 5.0f, format});
  }
  uint32_t seed = 0;
  for (const Shape& shape : shapes) {
    seed++;
    const int64_t length = 201;
    std::vector<float> first;
    for (const Isa& isa : isas) {
      const std::string what = std::string(isa.name) + " " + shape.name();
      const auto want = decode_all(isa, shape, length, seed);
      if (first.empty()) first = want;
      check(same_bits(want.data(), first.data(), want.size()), what + ": bits differ");
      Sequence s(isa, shape, length, seed);
      check_values(s, want, shape, what);
      for (int64_t chunk : {2, 7, 32, 64, 201})
        check_chunks(isa, shape, want, length, seed, chunk, what);
      check_written_ahead(isa, shape, want, length, seed, what);
    }
  }
}

// Over several splits: decode at chosen positions, and items that straddle a split.
void long_context(const std::vector<Isa>& isas) {
  for (const Shape& shape :
       {Shape{3, 64, 0, 0}, Shape{1, 32, 1500, 0}, Shape{2, 16, 0, 10.0f},
        Shape{2, 32, 0, 0, KVFormat::fp16}, Shape{2, 32, 1500, 10.0f, KVFormat::int8},
        Shape{2, 16, 1100, 0, KVFormat::bf16, true, true}}) {
    const int64_t length = 2300;
    std::vector<float> first;
    for (const Isa& isa : isas) {
      const std::string what = std::string(isa.name) + " long " + shape.name();
      Sequence s(isa, shape, length, 99);
      s.store(0, length);
      std::vector<float> whole(length * s.width(), kNaN), one(s.width(), kNaN);
      for (int64_t t = 0; t < length; t += 32)
        s.run(t, std::min(length, t + 32), &whole[t * s.width()]);
      if (first.empty()) first = whole;
      check(same_bits(whole.data(), first.data(), whole.size()), what + ": bits differ");
      for (int64_t t : {0, 63, 64, 1023, 1024, 1025, 1087, 1088, 2047, 2048, 2049, 2299}) {
        s.run(t, t + 1, one.data());
        check(same_bits(one.data(), &whole[t * s.width()], one.size()),
              what + ": alone differs at " + std::to_string(t));
      }
      for (int64_t t : {0, 1023, 1024, 1500, 2047, 2290}) {
        const int64_t end = std::min(length, t + (t % 2 ? 33 : 1));
        std::vector<float> parts((end - t) * s.width(), kNaN);
        s.run(t, end, parts.data(), true);
        check(same_bits(parts.data(), &whole[t * s.width()], parts.size()),
              what + ": in parts differs at " + std::to_string(t));
      }
      std::vector<float> straddle(40 * s.width(), kNaN);
      s.run(1001, 1041, straddle.data());
      check(same_bits(straddle.data(), &whole[1001 * s.width()], straddle.size()),
            what + ": an item over a split border differs");
      if (isa.attention == isas.back().attention) check_values(s, whole, shape, what);
    }
  }
}

// What a row may not see may hold anything, whoever else sees it.
void others_are_infinite(const std::vector<Isa>& isas) {
  for (const Isa& isa : isas)
    for (const Shape& shape :
         {Shape{3, 64, 0, 0}, Shape{1, 80, 40, 0}, Shape{2, 32, 0, 15.0f},
          Shape{3, 64, 40, 0, KVFormat::fp16}, Shape{3, 64, 0, 0, KVFormat::int8},
          Shape{1, 80, 40, 15.0f, KVFormat::int8}}) {
      const int64_t length = 150, last = 90;  // odd and even borders within tiles and pages
      const auto want = decode_all(isa, shape, length, 8);
      for (int64_t end : {last, last + 1}) {
        Sequence s(isa, shape, length, 8);
        s.store(0, end);
        s.store_infinite(end, length);
        std::vector<float> out(want.size(), kNaN);
        for (int64_t t = 70; t < length; t += 40)  // the item that holds `end` sees both
          s.run(t, std::min(length, t + 40), &out[t * s.width()]);
        check(same_bits(&out[70 * s.width()], &want[70 * s.width()], (end - 70) * s.width()),
              std::string(isa.name) + " infinite later tokens leak, " + shape.name());
      }
    }
}

// A row whose logits are all -infinity has nothing in the tile; its neighbours in the register tile
// keep their bits.
void overflowed_rows(const std::vector<Isa>& isas, KVFormat format) {
  const Shape shape{3, 32, 0, 0, format};
  const int64_t length = 130;
  for (const Isa& isa : isas) {
    Sequence plain(isa, shape, length, 21), odd(isa, shape, length, 21);
    for (Sequence* s : {&plain, &odd}) {
      for (int64_t t = 0; t < length; t++) s->overflow_query(t, 1.0f);
      if (s == &plain) s->restore_queries(21);
      s->store(0, length);
    }
    const int64_t width = plain.width();
    std::vector<float> a(length * width, kNaN), b(a);
    plain.run(0, length, a.data());
    odd.run(0, length, b.data());
    for (int64_t t = 0; t < length; t++) {
      check(same_bits(&a[t * width + 32], &b[t * width + 32], 64),
            std::string(isa.name) + " an overflowed row changes its neighbours");
      check(std::isnan(b[t * width]), std::string(isa.name) + " an empty row has a value");
    }
  }
}

}  // namespace

int main() {
  flush_denormals();
  const auto isas = instruction_sets();
  sweep(isas);
  others_are_infinite(isas);
  for (int f = 0; f < int(KVFormat::count); f++) overflowed_rows(isas, KVFormat(f));
  long_context(isas);
  return finish("attention_test");
}
