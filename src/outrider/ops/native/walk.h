// A drafter's walk through its block: slot by slot a bias from the token before, and a draw from what that gives.
//
// Legend: requests R, slots of a block, draft vocabulary Vd, Markov rank r, hidden size D.
#pragma once

#include "attention.h"
#include "product.h"
#include "sampling.h"

namespace outrider {

struct Walk {                      // ops/native_kernels.py mirrors it
  const Matrix* bias;              // r inputs, Vd outputs; null: the drafter has none
  const float* features;           // fp32 [V, r], by the token before, or
  const uint16_t* features_bf16;   // bf16; both null without a bias
  const float* base;               // [R, slots, Vd], logits without the bias
  const float* hidden;             // rows of D by slot, hidden_stride floats from request to request
  const float* confidence;         // weights [D + r] or [D], and the bias behind them; null: no confidences
  const int64_t* anchors;          // [R]
  const Sampled* sampled;          // [R], of the first drafts
  const int64_t* draft_to_target;  // [Vd]; null: draft ids are target ids
  int64_t* ids;                    // [R, depth], target ids
  float* q;                        // [depth, R, Vd] what was drawn from, zeros where greedy; [1, R, Vd] if not kept
  float* confidences;              // [R, depth], logits
  int32_t requests, slots, depth, draft_vocab, vocab, rank, hidden_size, hidden_stride, confidence_size, keeps_q;
};

// Of one slot, before it is drawn: `features` of the token before [r], zeros without a bias.
inline float confidence(const Walk& w, int request, int slot, const float* features) {
  const float* hidden = w.hidden + size_t(request) * w.hidden_stride + size_t(slot) * w.hidden_size;
  float total = w.confidence[w.confidence_size];
  for (int d = 0; d < w.hidden_size; ++d) total += hidden[d] * w.confidence[d];
  for (int d = w.hidden_size; d < w.confidence_size; ++d) total += features[d - w.hidden_size] * w.confidence[d];
  return total;
}

// logits [R, Vd] of one slot, every one a finite number: a drafter may be wrong, never fatal. `rows` and `features`
// [R, whole groups of r] are buffers.
inline void slot_logits(Pool& pool, const Walk& w, int slot, const Rows& rows, float* features, float* logits) {
  const size_t width = size_t(rows.groups) * GROUP;
  std::fill_n(features, w.requests * width, 0.f);
  for (int r = 0; r < w.requests; ++r) {
    float* own = features + r * width;
    const size_t before = size_t(slot ? w.ids[size_t(r) * w.depth + slot - 1] : w.anchors[r]) * w.rank;
    if (w.features) load_row(w.features + before, own, w.rank);
    else if (w.features_bf16) load_row(w.features_bf16 + before, own, w.rank);
    if (w.confidence) w.confidences[size_t(r) * w.depth + slot] = confidence(w, r, slot, own);
  }
  const auto biased = [&](int r, int begin, int end, f32v bias) {
    for_vectors(w.base + (size_t(r) * w.slots + slot) * w.draft_vocab, begin, end, [&](int i, f32v x) {
      store_until(logits + size_t(r) * w.draft_vocab, i, end, finite(x + bias));
    });
  };
  if (!w.bias) {
    for (int r = 0; r < w.requests; ++r) biased(r, 0, w.draft_vocab, f32v{});
    return;
  }
  for (int r = 0; r < w.requests; ++r) quantise_row(features + r * width, rows, r);
  product(pool, *w.bias, rows, w.requests, [&](int r, int panel, f32v sums) {
    biased(r, panel * PANEL, std::min((panel + 1) * PANEL, w.draft_vocab), sums);
  });
}

// One request's draft of one slot; its logits become what it was drawn from.
inline void draw_slot(const Walk& w, int request, int slot, float* logits, SamplingScratch& scratch) {
  const Sampled& s = w.sampled[request];
  int column = 0;
  if (s.temperature == 0.f) {
    column = argmax(logits, w.draft_vocab);
    if (w.keeps_q) std::fill_n(logits, w.draft_vocab, 0.f);
  } else {
    scratch.logits.assign(logits, logits + w.draft_vocab);
    probabilities(scratch.logits.data(), w.draft_vocab, s, scratch, logits);
    column = std::max(draw(logits, w.draft_vocab, uniform(s, s.position + slot, PROPOSE), scratch), 0);
  }
  w.ids[size_t(request) * w.depth + slot] = w.draft_to_target ? w.draft_to_target[column] : column;
}

}  // namespace outrider
