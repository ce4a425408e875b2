// Threads that share one kernel call. Which thread computes what never changes a bit: the parts are whole outputs.
#pragma once
#include <atomic>
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
        for (; started_ < threads - 1; ++started_) std::thread([this, index = started_] { serve(index); }).detach();
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
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            ++turn_;
        }
        wake_.notify_all();
        job.take_parts();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;  // who wakes late finds nothing; who is inside is waited for
        left_.wait(lock, [this] { return inside_ == 0; });
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

    void serve(int index) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return turn_ != seen; });
            seen = turn_;
            Job* job = job_;
            if (!job || index >= threads_ - 1) continue;
            ++inside_;
            lock.unlock();
            job->take_parts();
            lock.lock();
            if (--inside_ == 0) left_.notify_all();
        }
    }

    std::mutex busy_;   // held by the call that uses the threads
    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_, left_;
    Job* job_ = nullptr;
    uint64_t turn_ = 0;
    int inside_ = 0;
    int started_ = 0;
    std::atomic<int> threads_{1};
};

}  // namespace edge
