// One pool of threads for all passes of this process. The caller works too; every other thread takes chunks from the
// front and the rest from the back, until they meet, so a core that others use takes fewer of them. Who computes a chunk
// never shows in a result. A thread with nothing to do asks the memory for what it will read first in a region to come.
//
// A region is open from run() until every chunk is done and no worker is inside. Workers enter an open region by
// counting themselves in; one that comes late finds it closed and is not waited for, so a sleeping or preempted worker
// costs nothing but its help. Between passes workers spin for SPIN rounds and then sleep in the kernel, so an idle
// engine takes no time from anyone. A forked child has none of its parent's threads: see of_this_process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "vec.h"

namespace outrider {

INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// What the first chunks of a region to come read, at the front and at the back.
struct Ahead {
  const uint8_t *front, *back;
  uint32_t bytes;
};

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), pid_(getpid()), asked_(threads) {
    for (int i = 1; i < threads; ++i) std::thread([this, i] { work(i); }).detach();
  }
  int threads() const { return threads_; }
  bool of_this_process() const { return pid_ == getpid(); }

  // What will be read soon: only ever a hint. For whoever calls run().
  void soon(const Ahead& ahead) {
    if (threads_ == 1) return;
    front_.store(ahead.front, std::memory_order_relaxed);  // whoever reads parts of two hints asks for what nobody needs
    back_.store(ahead.back, std::memory_order_relaxed);
    ahead_bytes_.store(ahead.bytes, std::memory_order_relaxed);
    ahead_number_.fetch_add(1, std::memory_order_release);
  }

  // What a thread takes after this chunk, most likely; this chunk where it is the last.
  int following(int chunk, int chunks, int thread) const {
    const int at_this_end = (threads_ + 1 - thread % 2) / 2;
    const int next = thread % 2 ? chunk - at_this_end : chunk + at_this_end;
    return next < 0 || next >= chunks ? chunk : next;
  }

  // fn(chunk, thread) for every chunk in 0..chunks-1; returns when all are done.
  template <class F>
  void run(int chunks, const F& fn) {
    if (threads_ == 1 || chunks <= 1) {
      for (int c = 0; c < chunks; ++c) fn(c, 0);
      return;
    }
    call_ = [](const void* context, int c, int t) { (*static_cast<const F*>(context))(c, t); };
    context_ = &fn;
    chunks_ = chunks;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t open = uint64_t(++epoch_) << 32;
    state_.store(open, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    take(0);
    uint64_t empty = open;
    for (int spins = 0; !state_.compare_exchange_weak(empty, open | CLOSED, std::memory_order_acq_rel); ++spins) {
      empty = open;
      if (spins < SPIN) asked_[0].ask(*this, 0);
      else sched_yield();
    }
  }

 private:
  static constexpr int SPIN = 4000;  // about 60 microseconds with pause on recent cores

  void take(int thread) {
    const uint64_t one = thread % 2 ? uint64_t(1) << 32 : 1;
    for (;;) {
      const uint64_t taken = next_.fetch_add(one, std::memory_order_relaxed);
      const uint64_t front = taken & 0xffffffff, back = taken >> 32;
      if (front + back >= uint64_t(chunks_)) return;
      call_(context_, int(thread % 2 ? chunks_ - 1 - back : front), thread);
    }
  }

  // How far a thread has got with the latest hint.
  struct alignas(64) Asked {
    uint32_t number = 0, byte = 0;

    void ask(const Pool& pool, int thread) {
      const uint32_t latest = pool.ahead_number_.load(std::memory_order_acquire);
      if (latest != number) number = latest, byte = 0;
      // Of many threads one asks at either end: what the others will read first is not known.
      if (thread > 1 || byte >= pool.ahead_bytes_.load(std::memory_order_relaxed)) return relax();
      const uint8_t* from = (thread ? pool.back_ : pool.front_).load(std::memory_order_relaxed);
      for (int line = 0; line < 4; ++line, byte += 64) __builtin_prefetch(from + byte, 0, 2);
    }
  };

  // An open region that is not the one just left; the caller is counted in. False: none within SPIN rounds.
  bool enter(uint64_t& last, int thread) {
    for (int spins = 0; spins < SPIN; ++spins, asked_[thread].ask(*this, thread)) {
      uint64_t state = state_.load(std::memory_order_acquire);
      while (!(state & CLOSED) && state >> 32 != last)
        if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
          last = state >> 32;
          return true;
        }
    }
    return false;
  }

  void work(int thread) {
    uint64_t last = 0;
    for (;;) {
      while (!enter(last, thread)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] {
          const uint64_t state = state_.load(std::memory_order_seq_cst);
          return !(state & CLOSED) && state >> 32 != last;
        });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      take(thread);
      state_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  static constexpr uint64_t CLOSED = uint64_t(1) << 31;  // above it the region's number, below it workers inside

  const int threads_;
  const pid_t pid_;
  void (*call_)(const void*, int, int) = nullptr;
  const void* context_ = nullptr;
  int chunks_ = 0;
  alignas(64) std::atomic<uint64_t> next_{0};  // chunks taken: below from the front, above from the back
  uint32_t epoch_ = 0;
  alignas(64) std::atomic<uint64_t> state_{CLOSED};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<uint32_t> ahead_number_{0};
  std::atomic<uint32_t> ahead_bytes_{0};
  std::atomic<const uint8_t*> front_{nullptr}, back_{nullptr};
  std::vector<Asked> asked_;  // of each thread
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace outrider
