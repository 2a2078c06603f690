// Threads for all kernels of the library: torch's own if possible.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

// GOMP_parallel, which runs on torch's threads. A second pool would compete with these, because they spin.
using Parallel = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);
inline std::atomic<Parallel> parallel{nullptr};

constexpr long SERIAL = 1 << 18;  // byte products that take less time than to wake threads up, tens of microseconds

struct Job {
    void (*part)(const void *, long number);
    const void *data;
    long parts;
    std::atomic<long> next{0};
};

inline void work(void *pointer) {
    Job &job = *static_cast<Job *>(pointer);
    for (long number; (number = job.next.fetch_add(1)) < job.parts;) job.part(job.data, number);
}

// Calls body(first, last) for ranges that cover 0 to n, on up to `threads` threads if the products are worth it.
template <class Body> void over(long n, long products, int threads, const Body &body) {
    const long most = products / SERIAL;
    long parts = threads < most ? threads : most;
    parts = parts < n ? parts : n;
    if (parts <= 1) return body(0, n);
    struct Data {
        const Body &body;
        long n, parts;
    } data{body, n, parts};
    Job job{[](const void *pointer, long number) {
                const Data &data = *static_cast<const Data *>(pointer);
                data.body(data.n * number / data.parts, data.n * (number + 1) / data.parts);
            },
            &data, parts};
    if (const Parallel run = parallel) return run(work, &job, (unsigned)parts, 0);
    std::vector<std::thread> others;  // without OpenMP: only for much work
    if (products / parts > 64 * SERIAL)
        for (long i = 1; i < parts; i++) others.emplace_back(work, &job);
    work(&job);
    for (auto &other : others) other.join();
}
