// Which slices of a token's experts run. Defined by kernels/reference/choose_slices.py. Baseline code, used by module.cpp
// only: a few dozen numbers per token.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

namespace edge {

struct SliceCall {
    const float* activations;  // [T * K, N * r], rows `stride` apart
    int64_t r, stride;
    const int32_t* ids;        // [T, K]
    const float* weights;      // [T, K]
    const float *slopes, *offsets;  // [E, N]
    int64_t T, K, N;
    const int32_t* tiers;  // [T]
    int32_t* masks;        // [T, K] written
    float* dropped;        // [T] written
};

inline void choose_slices(const SliceCall& call) {
    const int64_t K = call.K, N = call.N, n = K * N;
    static thread_local std::vector<float> scores;
    static thread_local std::vector<int32_t> order;
    scores.resize(static_cast<size_t>(n));
    order.resize(static_cast<size_t>(n));
    for (int64_t t = 0; t < call.T; ++t) {
        const int64_t tier = call.tiers[t];
        int32_t* mask = call.masks + t * K;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t j = i / N, s = i % N, at = int64_t(call.ids[t * K + j]) * N + s;
            const float* each = call.activations + (t * K + j) * call.stride + s * call.r;
            float sum = 0.0f;
            for (int64_t c = 0; c < call.r; ++c) sum += std::fabs(each[c]);
            const float mean = sum / static_cast<float>(call.r);
            const float score = call.weights[t * K + j] * (call.offsets[at] + call.slopes[at] * mean);
            scores[i] = score == score ? score : 0.0f;  // a nan has no place in an order
        }
        int64_t best = 0;
        for (int64_t s = 1; s < N; ++s)
            if (scores[s] > scores[best]) best = s;
        for (int64_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(i);
        const auto before = [&](int32_t a, int32_t b) {
            if (a == best || b == best) return a == best && b != best;
            return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
        };
        if (tier < n) std::partial_sort(order.begin(), order.begin() + std::max<int64_t>(tier, 0), order.end(), before);
        std::fill(mask, mask + K, 0);
        for (int64_t i = 0; i < std::min(std::max<int64_t>(tier, 0), n); ++i) mask[order[i] / N] |= 1 << (order[i] % N);
        float dropped = 0.0f;
        for (int64_t j = 0; j < K; ++j) {
            float total = 0.0f, left_out = 0.0f;
            for (int64_t s = 0; s < N; ++s) {
                total += scores[j * N + s];
                if (!(mask[j] >> s & 1)) left_out += scores[j * N + s];
            }
            dropped += call.weights[t * K + j] * left_out / std::max(total, FLT_MIN);
        }
        call.dropped[t] = dropped;
    }
}

}  // namespace edge
