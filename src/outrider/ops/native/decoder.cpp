// Whole passes through stacks of decoder layers, behind a C interface. ops/native_lib.py mirrors every struct here.
//
// One call is one pass: activations stay fp32 between matrix products, and no product, norm or softmax of a row looks at
// another row of the pass, so a row's result is bitwise the same in any company. One pass runs at a time per process.
//
// Legend: rows of a pass N, hidden size D, heads Hq and Hkv of size E, inner size I of the MLP. Buffers of rows are padded
// to whole groups with zeros.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

#include "attention.h"
#include "pack.h"
#include "product.h"
#include "sampling.h"
#include "walk.h"

using namespace outrider;

extern "C" {

struct Layer {
  Matrix qkv, output, gate_up, down;  // gate_up: panels in the order gate, up, gate, up, ...
  Matrix key_value;                   // k and v rows of qkv alone, for a drafter's context; data null elsewhere
  const float *input_norm, *post_norm, *query_norm, *key_norm;  // padded with zeros; the last two null without q/k norms
};

struct Decoder {
  const Layer* layers;
  const float* final_norm;
  int32_t num_layers, hidden, heads, kv_heads, head_dim, inner;
  float eps, scale;
};

struct Cache {  // one layer's pool [S, Hkv, E], fp32 or bf16
  void *key, *value;
};

struct Pass {
  const float* embedding;           // fp32 [V, D], or
  const uint16_t* embedding_bf16;   // bf16
  const int64_t* token_ids;         // [N]; blocks: each request's anchor, [R]
  const int64_t* positions;         // [N]; blocks: the anchor's, [R]
  const float *cos, *sin;           // [positions, E / 2]
  const Cache* caches;              // [num_layers]
  const int64_t* slots;             // [N]; null: a drafter's block, whose keys and values never enter the pool
  const int32_t* starts;            // [R + 1], each request's first row; blocks: not read
  const int32_t* lengths;           // [R]: causal the positions of the last row and before; block the context's
  const int32_t* tables;            // [R, table_width]
  const int32_t* tap_layers;        // [num_taps]; -1 is the embedding
  float* taps;                      // [N, num_taps * D]
  float* hidden;                    // [N, D], after the final norm; rows behind starts[R] are left alone
  int32_t rows, requests, table_width, block_size, num_taps, kv_is_bf16;
  int32_t vocab_size, num_positions;  // of the embedding and of the rotary tables
  int32_t block_width, mask_id;       // blocks: the anchor, then mask tokens, at ascending positions; 0: causal rows
};

struct Context {
  const Matrix* fc;
  const float* norm;        // of fc's output
  const float* taps;        // [N, taps_width]
  const int64_t* positions;
  const float *cos, *sin;
  const Cache* caches;
  const int64_t* slots;     // [N]; rows with -1 are skipped
  int32_t rows, taps_width, kv_is_bf16, num_positions;
};
}

namespace {

constexpr int UNITS_PER_THREAD = 4;  // of attention, where there is enough of it to cut

INLINE int grouped(int x) { return (x + GROUP - 1) / GROUP * GROUP; }

class QuantisedRows {
 public:
  // For `rows` rows that a matrix of `format` multiplies.
  Rows resized(int rows, int inputs, int format) {
    const int groups = grouped(inputs) / GROUP;
    const size_t all = size_t(rows + BESIDE - 1) / BESIDE * BESIDE * groups;
    if (scale_.size() < all) {
      quants_.resize(all * GROUP);
      scale_.resize(all);
      scaled_sum_.resize(all);
      start_.resize(all);
    }
    const bool paired = suits_pairs(format, rows);
    const size_t pairs = size_t(groups + 1) / 2 * (2 * BESIDE * GROUP);
    if (paired && paired_.size() < pairs) paired_.resize(pairs);
    return Rows{paired ? paired_.data() : quants_.data(), scale_.data(), scaled_sum_.data(), start_.data(), groups,
                rows == 1 ? 0 : BESIDE_SHIFT, paired};
  }

 private:
  Buffer<int8_t> quants_, paired_;  // what lies between the quants of pairs is never written, and zero
  Buffer<float> scale_, scaled_sum_;
  Buffer<int32_t> start_;
};

struct Unit {
  int request, row, rows, kv_head, kv_heads, first_seen;
  int chunk, chunks;  // of positions
  int split;          // index of what this is a part of, or -1
};

// Work on one set of queries that several threads share.
struct Split {
  std::unique_ptr<std::atomic<int>> parts_left = std::make_unique<std::atomic<int>>(0);
  int parts = 0;
  size_t partials = 0;  // where they start
};

// What a pass spends its time on; ops/native_kernels.py names them in this order.
enum Stage { NORM, QKV, ROTARY, ATTENTION, OUTPUT, GATE_UP, DOWN, LINEAR, SAMPLING, STAGES };

class Stopwatch {
 public:
  void start() { last_ = std::chrono::steady_clock::now(); }
  void mark(Stage stage) {
    const auto now = std::chrono::steady_clock::now();
    seconds[stage] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds[STAGES] = {};

 private:
  std::chrono::steady_clock::time_point last_;
};

struct Workspace {
  Stopwatch clock;
  QuantisedRows input, inner;
  Buffer<float> residual, qkv, attention;
  std::vector<std::vector<Scratch>> scratch;  // of each thread, for each head
  std::vector<Unit> units;
  std::vector<Split> splits;
  int num_splits = 0;
  Buffer<float> partials;
  std::vector<SamplingScratch> sampling;
  std::vector<int64_t> block_ids, block_positions;
  std::vector<int32_t> block_starts;
};

std::mutex pass_mutex;  // guards the three below
Pool* pool = nullptr;  // never deleted: its threads end with the process, and a forked child has none to join
Workspace space;
int wanted_threads = 1;

Pool& current_pool() {
  if (!pool || !pool->of_this_process()) pool = new Pool(wanted_threads);
  space.clock.start();
  if (space.scratch.size() < size_t(pool->threads())) {
    space.scratch.resize(pool->threads());
    space.sampling.resize(pool->threads());
  }
  return *pool;
}

float* sized(Buffer<float>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// The rows of a drafter's blocks, which `p` then points to.
void lay_out_blocks(Pass& p) {
  space.block_ids.assign(size_t(p.requests) * p.block_width, p.mask_id);
  space.block_positions.resize(space.block_ids.size());
  space.block_starts.resize(p.requests + 1);
  for (int r = 0; r <= p.requests; ++r) space.block_starts[r] = r * p.block_width;
  for (int r = 0; r < p.requests; ++r) {
    const int first = space.block_starts[r];
    space.block_ids[first] = p.token_ids[r];
    for (int i = 0; i < p.block_width; ++i) space.block_positions[first + i] = p.positions[r] + i;
  }
  p.token_ids = space.block_ids.data();
  p.positions = space.block_positions.data();
  p.starts = space.block_starts.data();
}

// fn(row) for every row, each row on one thread. Rows whose quants lie beside one another go to the same one: their
// scales share cache lines.
template <class F>
void for_rows(Pool& p, int rows, const F& fn) {
  const int wanted = rows <= INLINE_ROWS ? rows : std::max(1, rows / (p.threads() * 4));
  const int size = (wanted + BESIDE - 1) / BESIDE * BESIDE;
  p.run((rows + size - 1) / std::max(size, 1), [&](int chunk, int) {
    for (int row = chunk * size; row < std::min(rows, (chunk + 1) * size); ++row) fn(row);
  });
}

INLINE float inverse_rms(const float* x, int size, int width, float eps) {
  f32v squares = {};
  for (int d = 0; d < width; d += LANES) squares = fma(load(x + d), load(x + d), squares);
  return 1.f / std::sqrt(sum(squares) / float(size) + eps);
}

// RMSNorm of one padded row, quantised.
INLINE void norm_and_quantise(const float* x, const float* weight, int size, float eps, const Rows& to, int row) {
  const f32v inverse = splat(inverse_rms(x, size, to.groups * GROUP, eps));
  for (int g = 0; g < to.groups; ++g) {
    const float *a = x + g * GROUP, *w = weight + g * GROUP;
    quantise_group(load(a) * inverse * load(w), load(a + LANES) * inverse * load(w + LANES), to,
                   to.at(row, g));
  }
}

// Per-head RMSNorm in place; norm padded to whole vectors.
INLINE void norm_head(float* head, const float* norm, int dim, float eps) {
  float x[512] = {};
  std::copy(head, head + dim, x);
  const float inverse = inverse_rms(x, dim, padded(dim), eps);
  for (int d = 0; d < dim; ++d) head[d] = head[d] * inverse * norm[d];
}

INLINE void rotate_head(float* head, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int e = 0; e < half; ++e) {
    const float a = head[e], b = head[half + e];
    head[e] = a * cos[e] - b * sin[e];
    head[half + e] = b * cos[e] + a * sin[e];
  }
}

INLINE void finish_head(float* head, const float* norm, const Decoder& m, const float* cos, const float* sin) {
  if (norm) norm_head(head, norm, m.head_dim, m.eps);
  rotate_head(head, cos, sin, m.head_dim);
}

template <class T>
INLINE void write_heads(const Decoder& m, const float* from, T* pool_rows, int64_t slot) {
  T* to = pool_rows + size_t(slot) * m.kv_heads * m.head_dim;
  for (int i = 0; i < m.kv_heads * m.head_dim; ++i) put(to + i, from[i]);
}

INLINE f32v biased(const Matrix& w, int panel, f32v sums) {
  return w.bias ? sums + load(w.bias + panel * PANEL) : sums;
}

// out[row][panel] = sums, or += where it is a residual stream; stride in floats.
void product_into(Pool& p, const Matrix& w, const Rows& x, int rows, float* out, size_t stride, bool add) {
  product(p, w, x, rows, [&](int row, int panel, f32v sums) {
    float* to = out + row * stride + panel * PANEL;
    sums = biased(w, panel, sums);
    store(to, add ? load(to) + sums : sums);
  });
}

INLINE f32v silu(f32v x) { return x / (splat(1.f) + exp(-x)); }

// silu(gate) * up, quantised where it is computed: the two gate and two up panels of one group together.
void gated_product(Pool& pool, const Matrix& w, const Rows& x, int rows, const Rows& out) {
  for_parts(pool, w, x, rows, 4, [&](Part& part) {
    part.for_blocks(rows, 4, [&](int panel, int row, int count) {
      f32v sums[4][BLOCK];
      for (int k = 0; k < 4; ++k) part.sums(panel + k, row, count, sums[k]);
      for (int r = 0; r < count; ++r) {
        f32v half[2];
        for (int k = 0; k < 2; ++k)
          half[k] = silu(biased(w, panel + 2 * k, sums[2 * k][r])) * biased(w, panel + 2 * k + 1, sums[2 * k + 1][r]);
        quantise_group(half[0], half[1], out, out.at(row + r, panel / 4));
      }
    });
  });
}

// Units of a pass, cut along the positions where there would be too few to keep all threads busy alike. Where there
// are enough requests of few rows, a unit takes all heads, whose keys and values are neighbours in memory.
void plan_units(const Decoder& m, const Pass& p, int threads, std::vector<Unit>& units) {
  units.clear();
  for (int r = 0; r < p.requests; ++r) {
    const int rows = p.starts[r + 1] - p.starts[r];
    const int first_seen = p.slots ? p.lengths[r] - rows + 1 : p.lengths[r] + rows;
    const int heads = rows <= UNIT_ROWS && p.requests >= UNITS_PER_THREAD * threads ? m.kv_heads : 1;
    for (int row = 0; row < rows; row += UNIT_ROWS) {
      const int count = std::min(UNIT_ROWS, rows - row), first = first_seen + (p.slots ? row : 0);
      const int length = first + (p.slots ? count - 1 : 0);
      for (int h = 0; h < m.kv_heads; h += heads)
        units.push_back({r, p.starts[r] + row, count, h, heads, first, 0, (length + CHUNK - 1) / CHUNK, -1});
    }
  }
  const int whole = int(units.size()), wanted = UNITS_PER_THREAD * threads;
  space.num_splits = 0;
  if (whole == 0 || whole >= wanted) return;
  const size_t floats = partial_floats(padded(m.head_dim)) * (m.heads / m.kv_heads);
  size_t used = 0;
  for (int index = 0; index < whole; ++index) {
    const Unit unit = units[index];
    const int parts = std::min(unit.chunks, (wanted + whole - 1) / whole);
    if (parts <= 1) continue;
    if (int(space.splits.size()) == space.num_splits) space.splits.emplace_back();
    Split& split = space.splits[space.num_splits];
    split.parts = parts;
    split.partials = used;
    used += floats * unit.rows * unit.chunks;
    for (int part = 0; part < parts; ++part) {
      Unit cut = unit;
      cut.chunk = unit.chunks * part / parts;
      cut.chunks = unit.chunks * (part + 1) / parts - cut.chunk;
      cut.split = space.num_splits;
      if (part == 0) units[index] = cut;
      else units.push_back(cut);
    }
    ++space.num_splits;
  }
  sized(space.partials, used);
}

template <class T>
void attention(Pool& pool, const Decoder& m, const Pass& p, const Cache& cache, const float* qkv, size_t stride,
               float* out, size_t out_stride) {
  const int E = m.head_dim, share = m.heads / m.kv_heads, units = int(space.units.size());
  const auto positions_of = [&](const Unit& u) {
    const float* own = qkv + size_t(p.starts[u.request]) * stride + (m.heads + u.kv_head) * E;
    return Positions<T>{
        (const T*)cache.key + u.kv_head * E,
        (const T*)cache.value + u.kv_head * E,
        size_t(m.kv_heads) * E,
        p.tables + size_t(u.request) * p.table_width,
        p.block_size,
        p.lengths[u.request],
        own,
        own + m.kv_heads * E,
        stride,
    };
  };
  const auto queries_of = [&](const Unit& u) {
    return Queries{qkv + u.row * stride + u.kv_head * share * E, stride, u.rows, share, E, u.first_seen,
                   p.slots != nullptr, m.scale};
  };
  for (int i = 0; i < space.num_splits; ++i) *space.splits[i].parts_left = space.splits[i].parts;
  pool.run(units, [&](int index, int thread) {
    const Unit& u = space.units[index];
    const Positions<T> kv = positions_of(u);
    const Queries q = queries_of(u);
    const Unit& other = space.units[pool.following(index, units, thread)];
    Chunk<T> after;
    positions_of(other).locate(other.chunk * CHUNK, queries_of(other).length(), after);
    float* to = out + u.row * out_stride + u.kv_head * share * E;
    std::vector<Scratch>& scratch = space.scratch[thread];
    if (int(scratch.size()) < u.kv_heads) scratch.resize(u.kv_heads);
    if (u.split < 0) return attend(kv, scratch.data(), q, u.kv_heads, after, to, out_stride);
    Split& split = space.splits[u.split];
    float* partials = space.partials.data() + split.partials;
    attend_part(kv, scratch[0], q, u.chunk, u.chunks, after, partials);
    if (split.parts_left->fetch_sub(1, std::memory_order_acq_rel) == 1) join(q, partials, to, out_stride);
  });
}

template <class T>
void layer_pass(Pool& pool, const Decoder& m, const Pass& p, const Layer& layer, const Cache& cache, int rows,
                const Layer* next) {
  const int E = m.head_dim, Q = m.heads * E, KV = m.kv_heads * E;
  const size_t width = grouped(m.hidden), qkv_width = layer.qkv.panels * PANEL, mix_width = grouped(Q);
  float *residual = space.residual.data(), *qkv = sized(space.qkv, rows * qkv_width);
  float* mixed = sized(space.attention, rows * mix_width);
  Rows x = space.input.resized(rows, m.hidden, layer.qkv.format);
  for_rows(pool, rows, [&](int r) { norm_and_quantise(residual + r * width, layer.input_norm, m.hidden, m.eps, x, r); });
  space.clock.mark(NORM);
  pool.soon(read_first(layer.output, rows, pool.threads(), 1));
  product_into(pool, layer.qkv, x, rows, qkv, qkv_width, false);
  space.clock.mark(QKV);
  for_rows(pool, rows, [&](int r) {
    float* row = qkv + r * qkv_width;
    const float *cos = p.cos + p.positions[r] * (E / 2), *sin = p.sin + p.positions[r] * (E / 2);
    for (int h = 0; h < m.heads; ++h) finish_head(row + h * E, layer.query_norm, m, cos, sin);
    for (int h = 0; h < m.kv_heads; ++h) finish_head(row + Q + h * E, layer.key_norm, m, cos, sin);
    if (p.slots && p.slots[r] >= 0) {
      write_heads(m, row + Q, (T*)cache.key, p.slots[r]);
      write_heads(m, row + Q + KV, (T*)cache.value, p.slots[r]);
    }
  });
  space.clock.mark(ROTARY);
  attention<T>(pool, m, p, cache, qkv, qkv_width, mixed, mix_width);
  space.clock.mark(ATTENTION);
  x = space.input.resized(rows, Q, layer.output.format);
  for_rows(pool, rows, [&](int r) {
    std::fill(mixed + r * mix_width + Q, mixed + (r + 1) * mix_width, 0.f);
    quantise_row(mixed + r * mix_width, x, r);
  });
  space.clock.mark(NORM);
  pool.soon(read_first(layer.gate_up, rows, pool.threads(), 4));
  product_into(pool, layer.output, x, rows, residual, width, true);
  space.clock.mark(OUTPUT);
  x = space.input.resized(rows, m.hidden, layer.gate_up.format);
  for_rows(pool, rows, [&](int r) { norm_and_quantise(residual + r * width, layer.post_norm, m.hidden, m.eps, x, r); });
  const Rows inner = space.inner.resized(rows, m.inner, layer.down.format);
  space.clock.mark(NORM);
  pool.soon(read_first(layer.down, rows, pool.threads(), 1));
  gated_product(pool, layer.gate_up, x, rows, inner);
  space.clock.mark(GATE_UP);
  if (next) pool.soon(read_first(next->qkv, rows, pool.threads(), 1));
  product_into(pool, layer.down, inner, rows, residual, width, true);
  space.clock.mark(DOWN);
}

void copy_taps(const Decoder& m, const Pass& p, int layer, int rows) {
  const size_t width = grouped(m.hidden);
  for (int t = 0; t < p.num_taps; ++t)
    if (p.tap_layers[t] == layer)
      for (int r = 0; r < rows; ++r)
        std::copy_n(&space.residual[r * width], m.hidden, p.taps + (size_t(r) * p.num_taps + t) * m.hidden);
}

void embed(const Decoder& m, const Pass& p, int rows) {
  const size_t width = grouped(m.hidden);
  float* residual = sized(space.residual, rows * width);
  for (int r = 0; r < rows; ++r) {
    float* to = residual + r * width;
    if (p.embedding) load_row(p.embedding + p.token_ids[r] * m.hidden, to, m.hidden);
    else load_row(p.embedding_bf16 + p.token_ids[r] * m.hidden, to, m.hidden);
    std::fill(to + m.hidden, to + width, 0.f);
  }
}

void final_norm(Pool& pool, const Decoder& m, const Pass& p, int rows) {
  const size_t width = grouped(m.hidden);
  for_rows(pool, rows, [&](int r) {
    const float* x = &space.residual[r * width];
    const float inverse = inverse_rms(x, m.hidden, width, m.eps);
    for (int d = 0; d < m.hidden; ++d) p.hidden[size_t(r) * m.hidden + d] = x[d] * inverse * m.final_norm[d];
  });
}

template <class T>
void store_context(Pool& pool, const Decoder& m, const Context& c) {
  const int E = m.head_dim, KV = m.kv_heads * E, rows = c.rows;
  const size_t width = grouped(m.hidden);
  float* projected = sized(space.residual, rows * width);
  const size_t taps_width = grouped(c.taps_width);
  float* taps = sized(space.attention, rows * taps_width);
  Rows x = space.input.resized(rows, c.taps_width, c.fc->format);
  for_rows(pool, rows, [&](int r) {
    std::copy_n(c.taps + size_t(r) * c.taps_width, c.taps_width, taps + r * taps_width);
    std::fill(taps + r * taps_width + c.taps_width, taps + (r + 1) * taps_width, 0.f);
    quantise_row(taps + r * taps_width, x, r);
    std::fill(projected + r * width, projected + (r + 1) * width, 0.f);
  });
  product_into(pool, *c.fc, x, rows, projected, width, false);
  // All layers' matrices have one format.
  x = space.input.resized(rows, m.hidden, m.layers[0].key_value.format);
  for_rows(pool, rows, [&](int r) { norm_and_quantise(projected + r * width, c.norm, m.hidden, m.eps, x, r); });
  for (int i = 0; i < m.num_layers; ++i) {
    const Layer& layer = m.layers[i];
    const size_t kv_width = layer.key_value.panels * PANEL;
    float* kv = sized(space.qkv, rows * kv_width);
    product_into(pool, layer.key_value, x, rows, kv, kv_width, false);
    for_rows(pool, rows, [&](int r) {
      if (c.slots[r] < 0) return;
      float* row = kv + r * kv_width;
      const float *cos = c.cos + c.positions[r] * (E / 2), *sin = c.sin + c.positions[r] * (E / 2);
      for (int h = 0; h < m.kv_heads; ++h) finish_head(row + h * E, layer.key_norm, m, cos, sin);
      write_heads(m, row, (T*)c.caches[i].key, c.slots[r]);
      write_heads(m, row + KV, (T*)c.caches[i].value, c.slots[r]);
    });
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// "amx", "avx512-vnni", "avx512", "avx2" or "portable": how integer products are made. All give the same results.
const char* outrider_isa() {
#if OUTRIDER_AMX
  if (amx_permitted()) return "amx";
#endif
#if defined(__AVX512VNNI__) && OUTRIDER_AVX512
  return "avx512-vnni";
#elif OUTRIDER_AVX512
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}

// Threads of this process's passes; only before the first of them.
void outrider_set_threads(int threads) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  if (!pool) wanted_threads = std::max(1, threads);
}

int64_t outrider_packed_bytes(int format, int panels, int inputs) {
  return int64_t(panels) * panel_bytes(format, grouped(inputs) / GROUP);
}

double outrider_pack(const void* weights, int is_bf16, int inputs, const int64_t* order, int panels, int format,
                     uint8_t* data) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  Pool& p = current_pool();
  if (is_bf16) return pack(p, (const bf16*)weights, inputs, order, panels, format, data);
  return pack(p, (const float*)weights, inputs, order, panels, format, data);
}

// out [rows, outputs] = x [rows, inputs] times the packed matrix.
void outrider_linear(const Matrix* w, const float* x, int rows, int inputs, float* out, int outputs) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  Pool& p = current_pool();
  const size_t width = grouped(inputs);
  float* padded_x = sized(space.attention, rows * width);
  const Rows quantised = space.input.resized(rows, inputs, w->format);
  for_rows(p, rows, [&](int r) {
    std::copy_n(x + size_t(r) * inputs, inputs, padded_x + r * width);
    std::fill(padded_x + r * width + inputs, padded_x + (r + 1) * width, 0.f);
    quantise_row(padded_x + r * width, quantised, r);
  });
  product(p, *w, quantised, rows, [&](int row, int panel, f32v sums) {
    float* to = out + size_t(row) * outputs + panel * PANEL;
    sums = biased(*w, panel, sums);
    if ((panel + 1) * PANEL <= outputs) return store(to, sums);
    for (int i = 0; panel * PANEL + i < outputs; ++i) to[i] = sums[i];
  });
  space.clock.mark(LINEAR);
}

// Of each row whether all of it is finite.
void outrider_finite_rows(const float* x, int rows, int size, int32_t* finite) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  current_pool().run(rows, [&](int r, int) { finite[r] = all_finite(x + size_t(r) * size, size); });
}

// Seconds spent in each stage since the last call.
void outrider_stage_seconds(double* seconds) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  std::copy_n(space.clock.seconds, int(STAGES), seconds);
  std::fill_n(space.clock.seconds, int(STAGES), 0.0);
}

// Reads all of `data` once with every thread, in pieces of 64 KiB; what the machine allows a pass over weights.
int64_t outrider_read(const uint8_t* data, int64_t bytes) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  constexpr int64_t PIECE = 1 << 16;
  std::atomic<int64_t> total{0};
  current_pool().run(int(bytes / PIECE), [&](int piece, int) {
    i32v sums[4] = {};
    for (int64_t i = 0; i < PIECE; i += 256)
      for (int k = 0; k < 4; ++k) {
        i32v x;
        std::memcpy(&x, data + piece * PIECE + i + 64 * k, 64);
        sums[k] += x;
      }
    total += sum(sums[0] + sums[1] + sums[2] + sums[3]);
  });
  return total;
}

// `rounds` times 16 rows [BLOCK, inputs] by the first panel, spread over the threads, from the nearest cache: what the
// machine's arithmetic allows these products.
void outrider_multiply(const Matrix* w, const float* x, int rounds) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  Pool& p = current_pool();
  const Rows rows = space.input.resized(BLOCK, w->groups * GROUP, w->format);
  for (int r = 0; r < BLOCK; ++r) quantise_row(x + size_t(r) * w->groups * GROUP, rows, r);
  std::atomic<float> seen{0.f};  // results that nobody reads are not computed
  p.run(rounds, [&](int, int) {
    Part part(*w, rows, 0, 1, 0);
    f32v sums[BLOCK], total = {};
    part.for_blocks(BLOCK, 1, [&](int panel, int row, int count) {
      part.sums(panel, row, count, sums);
      for (int r = 0; r < count; ++r) total = total + sums[r];
    });
    seen.store(total[0], std::memory_order_relaxed);
  });
}

// 0, or what is wrong with the rows: 1 a token id, 2 a position. Nothing is written then.
int outrider_pass(const Decoder* m, const Pass* given) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  Pool& pool = current_pool();
  Pass rows_given = *given;
  if (given->block_width) lay_out_blocks(rows_given);
  const Pass* p = &rows_given;
  const int rows = p->starts[p->requests];
  for (int r = 0; r < rows; ++r) {
    if (uint64_t(p->token_ids[r]) >= uint64_t(p->vocab_size)) return 1;
    if (uint64_t(p->positions[r]) >= uint64_t(p->num_positions)) return 2;
  }
  embed(*m, *p, rows);
  plan_units(*m, *p, pool.threads(), space.units);
  copy_taps(*m, *p, -1, rows);
  for (int i = 0; i < m->num_layers; ++i) {
    const Layer* next = i + 1 < m->num_layers ? &m->layers[i + 1] : nullptr;
    if (p->kv_is_bf16) layer_pass<bf16>(pool, *m, *p, m->layers[i], p->caches[i], rows, next);
    else layer_pass<float>(pool, *m, *p, m->layers[i], p->caches[i], rows, next);
    copy_taps(*m, *p, i, rows);
  }
  final_norm(pool, *m, *p, rows);
  space.clock.mark(NORM);
  return 0;
}

// 0, or 2 for a position beyond the tables.
int outrider_write_context(const Decoder* m, const Context* c) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  for (int r = 0; r < c->rows; ++r)
    if (uint64_t(c->positions[r]) >= uint64_t(c->num_positions)) return 2;
  if (c->kv_is_bf16) store_context<bf16>(current_pool(), *m, *c);
  else store_context<float>(current_pool(), *m, *c);
  return 0;
}

// 0, or 1 for an anchor beyond the vocabulary.
int outrider_walk(const Walk* w) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  for (int r = 0; r < w->requests; ++r)
    if (uint64_t(w->anchors[r]) >= uint64_t(w->vocab)) return 1;
  Pool& pool = current_pool();
  const Rows rows = space.input.resized(w->requests, w->rank, w->bias ? w->bias->format : int(EIGHT));
  float* features = sized(space.attention, size_t(w->requests) * rows.groups * GROUP);
  for (int slot = 0; slot < w->depth; ++slot) {
    const size_t columns = w->draft_vocab;
    float* logits = w->q + (w->keeps_q ? slot : 0) * w->requests * columns;
    slot_logits(pool, *w, slot, rows, features, logits);
    space.clock.mark(LINEAR);
    pool.run(w->requests, [&](int r, int thread) {
      draw_slot(*w, r, slot, logits + r * columns, space.sampling[thread]);
    });
    space.clock.mark(SAMPLING);
  }
  return 0;
}

// 0, or 1 for a draft beyond the vocabulary, or one that is not in the draft vocabulary.
int outrider_verify(const Verification* v) {
  std::lock_guard<std::mutex> lock(pass_mutex);
  for (int r = 0; r < v->requests; ++r)
    for (int row = v->starts[r]; row < v->starts[r + 1] - 1; ++row) {
      const uint64_t id = v->drafts[row];
      if (id >= uint64_t(v->vocab)) return 1;
      if (v->q && (v->column_of_id ? id >= uint64_t(v->mapped_ids) || v->column_of_id[id] < 0
                                   : id >= uint64_t(v->draft_vocab)))
        return 1;
    }
  current_pool().run(v->requests, [&](int r, int thread) { verify(*v, r, space.sampling[thread]); });
  space.clock.mark(SAMPLING);
  return 0;
}
}
#pragma GCC visibility pop
