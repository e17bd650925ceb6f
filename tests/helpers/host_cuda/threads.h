// SPDX-License-Identifier: BSD-3-Clause
// One block of a kernel on the host: each of its threads has a stack of its own, and they take
// turns. A thread runs until it has to wait for others: at a barrier, a shuffle, a product of a
// warpgroup, a copy. Who comes next is drawn, and some warps sleep for a while, so that code which
// is right only because some warp happens to be early or late goes wrong.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct HostIndex {
  unsigned x = 0, y = 0, z = 0;
};
inline HostIndex threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

constexpr size_t kStackBytes = 1 << 17;  // the kernels' tiles of registers lie on the stack
constexpr int kWarp = 32;

struct Thread {
  ucontext_t first;
  jmp_buf place, end;
  bool is_started = false, is_done = true;
  const char* awaited = nullptr;              // what it waits for
  bool (*is_over)(const void*) = nullptr;     // whether it still has to
  const void* condition = nullptr;
};

// Something that happens at any time after it was asked for: the copy engine's work.
struct Deferred {
  std::function<void()> action;
  int thread;  // who asked
};

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  jmp_buf scheduler;
  const std::function<void()>* body = nullptr;
  std::vector<Deferred> deferred;
  std::vector<int> deferred_of;  // how many of each thread
  std::string failure;
  uint64_t random = 1;
};
inline Machine machine;

// What a block must not leave to the next.
inline std::vector<void (*)()> resets;
inline bool reset_between_blocks(void (*reset)()) { return resets.push_back(reset), true; }

// Which schedule the following blocks have.
inline void seed(uint64_t value) { machine.random = value * 0x9e3779b97f4a7c15u | 1; }

inline unsigned draw(unsigned below) {
  uint64_t& x = machine.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return static_cast<unsigned>((x >> 32) * below >> 32);
}

inline int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// Back from a thread to the scheduler, until it lets the thread go on.
[[gnu::noinline]] inline void leave() {
  if (!_setjmp(machine.threads[threadIdx.x]->place)) _longjmp(machine.scheduler, 1);
}

// From the scheduler to a thread, until it leaves.
[[gnu::noinline]] inline void enter(unsigned index) {
  Thread& thread = *machine.threads[index];
  threadIdx.x = index;
  if (_setjmp(machine.scheduler)) return;
  if (thread.is_started) _longjmp(thread.place, 1);
  thread.is_started = true;
  setcontext(&thread.first);
}

// Ends the block: what the kernel did has no meaning on a device.
[[noreturn]] inline void fail(const std::string& what) {
  machine.failure = "thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x) + ": " + what;
  leave();
  __builtin_unreachable();
}

[[noreturn]] inline void exit_thread() { _longjmp(machine.threads[threadIdx.x]->end, 1); }

template <class Condition>
void wait_until(const char* awaited, const Condition& condition) {
  Thread& me = *machine.threads[threadIdx.x];
  if (condition() && draw(4)) return;
  me.awaited = awaited, me.condition = &condition;
  me.is_over = [](const void* pointer) { return (*static_cast<const Condition*>(pointer))(); };
  leave();
}

// A point that a number of threads pass together.
struct Meeting {
  unsigned arrived = 0, round = 0;

  void arrive(unsigned count) {
    if (++arrived < count) return;
    arrived = 0;
    ++round;
  }
  void wait_for(const char* awaited, unsigned count) {
    const unsigned now = round;
    arrive(count);
    wait_until(awaited, [this, now] { return round != now; });
  }
};

// What threads of a warp do together: the last to come does it for all, from what each brought.
struct WarpMeeting {
  Meeting meeting;
  void* brought[kWarp] = {};
};

inline Meeting block_barriers[16];
inline WarpMeeting whole_warps[32];
inline std::map<unsigned, WarpMeeting> parts_of_warps[32];  // by mask: several may be in flight in a warp

template <class Item, class All>
void together(unsigned mask, Item& mine, const char* awaited, All all) {
  if (!(mask >> lane() & 1)) fail("a warp's mask without the thread itself");
  WarpMeeting& warps = mask == ~0u ? whole_warps[warp()] : parts_of_warps[warp()][mask];
  warps.brought[lane()] = &mine;
  const unsigned now = warps.meeting.round;
  if (warps.meeting.arrived + 1 == static_cast<unsigned>(__builtin_popcount(mask))) {
    all([&](int of) -> Item* { return mask >> of & 1 ? static_cast<Item*>(warps.brought[of]) : nullptr; });
  }
  warps.meeting.arrive(__builtin_popcount(mask));
  wait_until(awaited, [&warps, now] { return warps.meeting.round != now; });
}

// Something that the copy engine does later, in any order.
inline void defer(std::function<void()> action) {
  machine.deferred.push_back({std::move(action), static_cast<int>(threadIdx.x)});
  ++machine.deferred_of[threadIdx.x];
}

inline void run_deferred() {
  const size_t chosen = draw(machine.deferred.size());
  Deferred one = std::move(machine.deferred[chosen]);
  machine.deferred[chosen] = std::move(machine.deferred.back());
  machine.deferred.pop_back();
  --machine.deferred_of[one.thread];
  one.action();
}

inline void run_thread() {
  while (true) {
    if (!_setjmp(machine.threads[threadIdx.x]->end)) (*machine.body)();
    machine.threads[threadIdx.x]->is_done = true;
    leave();
  }
}

inline std::string who_waits() {
  std::map<std::string, int> counts;
  for (const auto& thread : machine.threads) {
    if (!thread->is_done && thread->awaited) ++counts[thread->awaited];
  }
  std::string text;
  for (const auto& [what, count] : counts) {
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads for " + what;
  }
  return text;
}

inline void start_threads(int count) {
  while (static_cast<int>(machine.threads.size()) < count) machine.threads.push_back(std::make_unique<Thread>());
  machine.deferred.clear(), machine.deferred_of.assign(count, 0);
  for (Meeting& barrier : block_barriers) barrier = {};
  for (WarpMeeting& warp : whole_warps) warp = {};
  for (auto& meetings : parts_of_warps) meetings.clear();
  machine.failure.clear();
  for (const auto reset : resets) reset();
  for (int i = 0; i < count; ++i) {
    Thread& thread = *machine.threads[i];
    thread.is_done = false, thread.is_over = nullptr, thread.awaited = nullptr;
    if (thread.is_started) continue;
    getcontext(&thread.first);
    thread.first.uc_stack.ss_sp =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    thread.first.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.first, run_thread, 0);
  }
}

// Lets the threads of a warp run until all of them wait; whether any could.
inline bool run_warp(int warp, int threads, int& living) {
  bool moved = false;
  const bool forwards = draw(2);
  for (int turn = 0; turn < kWarp; ++turn) {
    const int index = warp * kWarp + (forwards ? turn : kWarp - 1 - turn);
    if (index >= threads) continue;
    Thread& thread = *machine.threads[index];
    if (thread.is_done || (thread.is_over && !thread.is_over(thread.condition))) continue;
    thread.is_over = nullptr;
    moved = true;
    enter(index);
    if (!machine.failure.empty()) return false;
    living -= thread.is_done;
  }
  return moved;
}

// Runs `kernel` by all threads of a block. std::runtime_error where they wait for each other, or do
// what a device does not.
inline void run_block(int threads, const std::function<void()>& kernel) {
  start_threads(threads);
  machine.body = &kernel, blockDim = {static_cast<unsigned>(threads), 1, 1};
  const int warps = (threads + kWarp - 1) / kWarp;
  std::vector<unsigned> sleep(warps);
  int living = threads;
  while (living > 0) {
    bool moved = false, sleeps = false;
    for (int turn = 0, first = draw(warps); turn < warps; ++turn) {
      const int one = (first + turn) % warps;
      if (sleep[one] > 0) {
        --sleep[one];
        sleeps = true;
        continue;
      }
      if (draw(64) == 0) sleep[one] = draw(64);
      for (unsigned most = 1 + draw(64); most > 0 && run_warp(one, threads, living); --most) moved = true;
      if (!machine.failure.empty()) break;
    }
    if (!machine.deferred.empty() && (!moved || draw(2))) {
      run_deferred();
      moved = true;
    }
    if (machine.failure.empty() && !moved && !sleeps && living > 0) machine.failure = "a deadlock: " + who_waits();
    if (machine.failure.empty()) continue;
    for (auto& thread : machine.threads) {
      if (thread->is_done) continue;
      munmap(thread->first.uc_stack.ss_sp, kStackBytes);
      thread = std::make_unique<Thread>();
    }
    throw std::runtime_error(machine.failure);
  }
  while (!machine.deferred.empty()) run_deferred();
}

}  // namespace host_cuda
