// Sampling from rows of logits: temperature, filters, softmax, draws by named random numbers, and the rule of acceptance.
//
// The meaning is that of sampling/filters.py, random.py, sampler.py and rejection.py, step by step and with their
// roundings, but for exponentials and the order of a softmax's sum. Each function looks at rows of one request, in a fixed
// order and on one thread: results depend neither on other requests nor on the instruction set.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "vec.h"

namespace outrider {

// How a request samples in one round, and what names its random numbers. ops/native_kernels.py mirrors it.
struct Sampled {
  uint64_t seed;
  int64_t position, anchor;  // of the first token to sample; of the round
  double top_p;              // 1: off
  double log_min_p;          // what a kept logit may lie below the largest; -infinity: off
  float temperature;         // 0: greedy
  int32_t top_k;             // 0: off
};

enum Role : uint32_t { TARGET = 0, PROPOSE = 1, ACCEPT = 2, RECOVER = 3 };

constexpr int STRETCH = 1024;                          // columns whose sums are taken apart
constexpr float WEIGHT_SCALE = 4503599627370496.f;     // 2^52
constexpr double TOP_P_SLACK = 1e-6;
constexpr float FIRST_REACH = 8.f, LAST_REACH = 64.f;  // of a filter's candidates below the largest logit
constexpr size_t FIRST_ORDERED = 128;                    // of these
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Candidate {
  float value;
  int32_t id;
  float prob;
};

// A thread's buffers, kept from call to call.
struct SamplingScratch {
  Buffer<float> logits, probs;
  std::vector<int64_t> weights, sums;
  std::vector<Candidate> candidates;
  std::vector<double> mass;
};

// Philox4x32-10 of the counter (position, role, anchor, 0): 53 bits in [0, 1).
inline double uniform(const Sampled& s, int64_t position, Role role) {
  uint32_t counter[4] = {uint32_t(position), role, uint32_t(s.anchor), 0};
  uint32_t key[2] = {uint32_t(s.seed), uint32_t(s.seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(counter[0]) * 0xD2511F53u, b = uint64_t(counter[2]) * 0xCD9E8D57u;
    counter[0] = uint32_t(b >> 32) ^ counter[1] ^ key[0];
    counter[2] = uint32_t(a >> 32) ^ counter[3] ^ key[1];
    counter[1] = uint32_t(b);
    counter[3] = uint32_t(a);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return double(uint64_t(counter[0] >> 5) << 26 | counter[1] >> 6) * 0x1p-53;
}

// fn(column, values) of sixteen columns at a time, those behind the end being -infinity.
template <class F>
INLINE void for_vectors(const float* row, int begin, int end, const F& fn) {
  int i = begin;
  for (; i + LANES <= end; i += LANES) fn(i, load(row + i));
  if (i == end) return;
  float rest[LANES];
  for (int lane = 0; lane < LANES; ++lane) rest[lane] = i + lane < end ? row[i + lane] : -INFINITE;
  fn(i, load(rest));
}

INLINE void store_until(float* row, int i, int end, f32v x) {
  if (i + LANES <= end) return store(row + i, x);
  for (int lane = 0; i + lane < end; ++lane) row[i + lane] = x[lane];
}

// The first largest column, NaN counting as the largest.
inline int argmax(const float* row, int size) {
  f32v most = splat(-INFINITE);
  i32v unordered = {};
  for_vectors(row, 0, size, [&](int, f32v x) {
    most = max(x, most);
    unordered |= x != x;
  });
  const bool has_nan = largest(-unordered) > 0;
  const float top = largest(most);
  int i = 0;
  while (i + 1 < size && !(has_nan ? row[i] != row[i] : row[i] == top)) ++i;
  return i;
}

inline bool all_finite(const float* row, int size) {
  i32v most = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) most = max(magnitude(load(row + i)), most);
  int32_t top = largest(most);
  for (; i < size; ++i) top = std::max(top, largest(magnitude(splat(row[i]))));
  return as_float(top) < INFINITE;
}

// Every number finite: NaN is 0, and infinities are the largest numbers.
INLINE f32v finite(f32v x) {
  constexpr float most = std::numeric_limits<float>::max();
  x = x != x ? f32v{} : x;
  x = x > splat(most) ? splat(most) : x;
  return x < splat(-most) ? splat(-most) : x;
}

// Keep a prefix of the order (logit descending, id ascending) and let it sum to 1; see sampling/filters.py for its
// length. Candidates are the logits at most `reach` below the largest, a prefix of the order too: where they do not settle
// the length, they reach further, at last over the whole row.
inline void filter(const float* logits, int size, const Sampled& s, float top, SamplingScratch& scratch, float* probs) {
  std::vector<Candidate>& found = scratch.candidates;
  std::vector<double>& mass = scratch.mass;
  const f32v divisor = splat(s.temperature);
  const bool bounded = s.log_min_p > -std::numeric_limits<double>::infinity();
  const double floor = double(top) + s.log_min_p;
  const size_t limit = s.top_k > 0 ? std::min(s.top_k, size) : size;
  size_t kept = 0;
  for (float reach = FIRST_REACH; kept == 0; reach = reach < LAST_REACH ? 2.f * reach : INFINITE) {
    const bool all = reach == INFINITE;
    const f32v least = splat(top - reach);
    found.clear();
    for_vectors(logits, 0, size, [&](int i, f32v x) {
      const f32v value = x / divisor;
      const i32v near = value >= least;
      if (largest(-near) == 0) return;
      for (int lane = 0; lane < LANES && i + lane < size; ++lane)
        if (near[lane]) found.push_back({value[lane], i + lane, probs[i + lane]});
    });
    size_t length = limit;
    if (bounded) {
      const size_t above =
          std::count_if(found.begin(), found.end(), [&](const Candidate& c) { return double(c.value) >= floor; });
      if (all || above < found.size()) length = std::min(length, above);
      else if (found.size() < limit) continue;
    }
    const bool whole = length == size_t(size);  // nothing dropped yet: the mass is 1
    if (length > found.size() && !(whole && s.top_p < 1.0)) continue;
    const size_t ordered = std::min(length, found.size());
    const auto before = [](const Candidate& a, const Candidate& b) {
      return a.value > b.value || (a.value == b.value && a.id < b.id);
    };
    const double share = s.top_p - TOP_P_SLACK, enough = whole && s.top_p < 1.0 ? share : INFINITE;
    double sum = 0.0;
    mass.clear();
    for (size_t n = 0, next; n < ordered && sum < enough;) {  // in order, as far as the mass is needed
      next = enough < INFINITE ? std::min(ordered, std::max(FIRST_ORDERED, 4 * n)) : ordered;
      if (next < found.size()) std::nth_element(found.begin() + n, found.begin() + next, found.end(), before);
      std::sort(found.begin() + n, found.begin() + next, before);
      for (; n < next; ++n) mass.push_back(sum += double(found[n].prob));
    }
    if (s.top_p < 1.0) {
      const double wanted = share * (whole ? 1.0 : sum);
      const size_t below = std::lower_bound(mass.begin(), mass.end(), wanted) - mass.begin();
      if (below == mass.size() && whole && !all) continue;
      length = std::min(length, below + 1);
    }
    kept = length;
  }
  std::fill_n(probs, size, 0.f);
  for (size_t j = 0; j < kept; ++j) probs[found[j].id] = float(double(found[j].prob) / mass[kept - 1]);
}

// What a row that is not greedy is sampled from: temperature, softmax, filters. Logits without a largest number give NaN.
inline void probabilities(const float* logits, int size, const Sampled& s, SamplingScratch& scratch, float* probs) {
  f32v most = splat(-INFINITE);
  for_vectors(logits, 0, size, [&](int, f32v x) { most = max(x, most); });
  const f32v divisor = splat(s.temperature);
  const float top = largest(most) / s.temperature;
  double total = 0.0;
  for (int begin = 0; begin < size; begin += STRETCH) {
    const int end = std::min(begin + STRETCH, size);
    f32v sums = {};
    for_vectors(logits, begin, end, [&](int i, f32v x) {
      const f32v below = x / divisor - splat(top);
      const f32v e = below < splat(-87.f) ? f32v{} : exp(below);
      sums += e;
      store_until(probs, i, end, e);
    });
    total += double(sum(sums));
  }
  const f32v inverse = splat(float(1.0 / total));
  for_vectors(probs, 0, size, [&](int i, f32v e) { store_until(probs, i, size, e * inverse); });
  const bool filters = s.top_k > 0 || s.top_p < 1.0 || s.log_min_p > -std::numeric_limits<double>::infinity();
  if (filters && total == total) filter(logits, size, s, top, scratch, probs);
}

// Integer weights proportional to probabilities: their sums are exact in any order.
INLINE int64_t weight(float prob) { return prob > 0.f ? int64_t(prob * WEIGHT_SCALE) : 0; }
INLINE int64_t weight(int64_t whole) { return whole; }

// The column at which the cumulative weight passes the number u in [0, 1); -1 where all weights are zero.
template <class T>
int draw(const T* row, int size, double u, SamplingScratch& scratch) {
  std::vector<int64_t>& sums = scratch.sums;
  sums.clear();
  int64_t total = 0;
  for (int begin = 0; begin < size; begin += STRETCH) {
    int64_t here = 0;
    for (int i = begin; i < std::min(begin + STRETCH, size); ++i) here += weight(row[i]);
    sums.push_back(here);
    total += here;
  }
  if (total <= 0) return -1;
  int64_t left = std::min(int64_t(u * double(total)), total - 1);
  int i = 0;
  for (size_t stretch = 0; left >= sums[stretch]; ++stretch) {
    left -= sums[stretch];
    i += STRETCH;
  }
  for (; left >= weight(row[i]); ++i) left -= weight(row[i]);
  return i;
}

// As draw(); logits that are not finite still give a column: other requests go on.
inline int draw_or_argmax(const float* probs, const float* logits, int size, double u, SamplingScratch& scratch) {
  const int column = draw(probs, size, u, scratch);
  return column >= 0 ? column : argmax(logits, size);
}

// Rows to verify, of all requests in request order; ops/native_kernels.py mirrors it.
struct Verification {
  const float* logits;              // [N, V]
  const int32_t* starts;            // [R + 1], each request's first row; the drafts ahead of its other rows are
  const int64_t* drafts;            // [N], at row n the draft tested there; unused at each request's last row
  const Sampled* sampled;           // [R]
  const float* const* q;            // per draft slot [R, Vd], what its drafts were drawn from; null: one at the draft
  const int64_t* draft_to_target;   // [Vd]; null: columns of q are target ids
  const int64_t* column_of_id;      // its inverse, -1 where there is none
  int32_t* accepted;                // [R], drafts
  int64_t* last;                    // [R], the token behind them
  int32_t requests, vocab, draft_vocab, mapped_ids;  // mapped_ids: length of column_of_id
};

// Of max(p - q, 0) where draft `id` was rejected; -1 where nothing is left of it.
inline int draw_residual(const Verification& v, const float* probs, const float* q, int64_t id, double u,
                         SamplingScratch& scratch) {
  scratch.weights.resize(v.vocab);
  int64_t* weights = scratch.weights.data();
  for (int i = 0; i < v.vocab; ++i) weights[i] = weight(probs[i]);
  if (!q) weights[id] = 0;
  for (int c = 0; q && c < v.draft_vocab; ++c) {
    const int64_t i = v.draft_to_target ? v.draft_to_target[c] : c;
    const double rest = double(probs[i]) - double(q[c]);
    weights[i] = rest > 0.0 ? int64_t(rest * double(WEIGHT_SCALE)) : 0;
  }
  return draw(weights, v.vocab, u, scratch);
}

// Rows are looked at up to the first rejection only.
inline void verify(const Verification& v, int request, SamplingScratch& scratch) {
  const Sampled& s = v.sampled[request];
  const int first = v.starts[request], last = v.starts[request + 1] - 1;
  scratch.probs.resize(v.vocab);
  float* probs = scratch.probs.data();
  for (int row = first;; ++row) {
    const float* logits = v.logits + size_t(row) * v.vocab;
    const int64_t id = v.drafts[row], position = s.position + (row - first);
    const auto end_with = [&](int64_t token) {
      v.accepted[request] = row - first;
      v.last[request] = token;
    };
    if (s.temperature == 0.f) {
      const int best = argmax(logits, v.vocab);
      if (row < last && best == id) continue;
      return end_with(best);
    }
    probabilities(logits, v.vocab, s, scratch, probs);
    if (row == last) return end_with(draw_or_argmax(probs, logits, v.vocab, uniform(s, position, TARGET), scratch));
    const float* q = v.q ? v.q[row - first] + size_t(request) * v.draft_vocab : nullptr;
    const double drawn = q ? double(q[v.column_of_id ? v.column_of_id[id] : id]) : 1.0;
    if (uniform(s, position, ACCEPT) * drawn < double(probs[id])) continue;
    const double u = uniform(s, position, RECOVER);
    const int recovered = draw_residual(v, probs, q, id, u, scratch);
    // Too little mass to draw from means that p and q are equal but for rounding; p is then as good.
    return end_with(recovered >= 0 ? recovered : draw_or_argmax(probs, logits, v.vocab, u, scratch));
  }
}

}  // namespace outrider
