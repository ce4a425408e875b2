// Threads that share one kernel call. Which thread computes what never changes a bit: the parts are whole outputs.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace edge {

class Pool {
  public:
    // The caller counts: 1 is no thread of our own. Threads are only ever added, idle ones sleep.
    void resize(int threads) {
        std::lock_guard<std::mutex> using_pool(busy_);
        for (; started_ < threads - 1; ++started_) std::thread([this, index = started_.load()] { serve(index); }).detach();
        threads_ = threads;
    }
    int threads() const { return threads_; }

    // work(part) for part in [0, parts), in any order; here and now if another call is using the threads.
    template <class Work>
    void run(int64_t parts, const Work& work) {
        if (parts <= 1 || threads_ <= 1 || !busy_.try_lock()) {
            for (int64_t part = 0; part < parts; ++part) work(part);
            return;
        }
        std::lock_guard<std::mutex> using_pool(busy_, std::adopt_lock);
        Job job{[](const void* work_, int64_t part) { (*static_cast<const Work*>(work_))(part); }, &work, parts, {0}};
        offer(&job);
        rouse();
        job.take_parts();
        offer(nullptr);  // who comes late finds nothing; who is inside is waited for
        if (spun_until([this] { return inside_ == 0; })) return;
        std::unique_lock<std::mutex> lock(mutex_);
        awaited_ = true;
        left_.wait(lock, [this] { return inside_ == 0; });
        awaited_ = false;
    }

    // Whether all threads look out for work at this moment.
    bool is_awake() const { return asleep_ <= started_ - (threads_ - 1); }

    // Threads look for work, and look out for more for a while.
    void rouse() {
        ++turn_;  // with no lock held: who sees it at once must not meet it
        if (asleep_ > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // who counts as asleep and holds it, is on its way to sleep
            wake_.notify_all();
        }
    }

  private:
    struct Job {
        void (*call)(const void*, int64_t);
        const void* work;
        int64_t parts;
        std::atomic<int64_t> next;
        void take_parts() {
            for (int64_t part; (part = next.fetch_add(1)) < parts;) call(work, part);
        }
    };

    // The calls of a step follow each other within microseconds, steps within 150 to 250, and a sleeping thread takes tens to
    // wake, as long as a small call. No longer: where others want the core, it must not burn for threads that do nothing.
    static constexpr std::chrono::microseconds SPIN{300};

    template <class Condition>
    static bool spun_until(const Condition& is_so) {
        const auto end = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int look = 0; look < 32; ++look) {
                if (is_so()) return true;
                pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        return is_so();
    }

    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ __volatile__("yield");
#endif
    }

    void offer(Job* job) {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = job;
    }

    void serve(int index) {
        for (uint64_t seen = 0;;) {
            const auto is_called = [&] { return turn_ != seen; };
            if (index >= threads_ - 1 || !spun_until(is_called)) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                wake_.wait(lock, is_called);
                --asleep_;
            }
            seen = turn_;
            Job* job;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                job = index < threads_ - 1 ? job_ : nullptr;
                if (job) ++inside_;
            }
            if (!job) continue;
            job->take_parts();
            if (--inside_ == 0 && awaited_) {
                { std::lock_guard<std::mutex> lock(mutex_); }
                left_.notify_all();
            }
        }
    }

    std::mutex busy_;   // held by the call that uses the threads
    std::mutex mutex_;  // guards job_, and that nobody falls asleep unseen
    std::condition_variable wake_, left_;
    Job* job_ = nullptr;
    std::atomic<uint64_t> turn_{0};
    std::atomic<int> inside_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> awaited_{false};
    std::atomic<int> started_{0};
    std::atomic<int> threads_{1};
};

}  // namespace edge
