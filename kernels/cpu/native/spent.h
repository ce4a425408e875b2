// Where the time of calls goes, in three kinds, for whoever wants a step's time in parts. Used by module.cpp only.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace edge {

enum Kind : int { DENSE = 0, ATTENTION = 1, EXPERTS = 2, NUM_KINDS = 3 };

// Nanoseconds of all calls since the process began; two readings of a clock a call, 50 ns together.
inline std::atomic<int64_t>& spent_ns(Kind kind) {
    static std::atomic<int64_t> ns[NUM_KINDS];
    return ns[kind];
}

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// From here to the end of the block, as time of one kind; within another one, that one's no more.
class Spending {
  public:
    explicit Spending(Kind kind, Kind within = NUM_KINDS) : kind_(kind), within_(within), began_(now_ns()) {}
    ~Spending() {
        const int64_t ns = now_ns() - began_;
        spent_ns(kind_).fetch_add(ns, std::memory_order_relaxed);
        if (within_ != NUM_KINDS) spent_ns(within_).fetch_sub(ns, std::memory_order_relaxed);
    }
    Spending(const Spending&) = delete;
    Spending& operator=(const Spending&) = delete;

  private:
    Kind kind_, within_;
    int64_t began_;
};

}  // namespace edge
